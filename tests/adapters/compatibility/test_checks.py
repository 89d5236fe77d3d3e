"""Configurations that cannot run in parallel raise on every rank and say what to do instead."""

import builtins
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, FluxTransformer2DModel, LuminaNextDiT2DModel, ModelMixin
from diffusers.guiders import SmoothedEnergyGuidance
from diffusers.hooks import FirstBlockCacheConfig, LayerSkipConfig, apply_layer_skip
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn
from torchao.quantization import Int8Tensor, PerRow

from benchmarks.harness import fake_group
from benchmarks.pages import PHASES, checks_of, errors_of
from para_core import PipeFusion
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
)
from para_core.adapters.cache.checks import check_cache, check_cached_call
from para_core.adapters.closest_names import closest_supported
from para_core.adapters.compatibility.checks import (
    CheckedModel,
    check_parallel_call,
    check_parallelize,
    models_to_check,
)
from para_core.adapters.denoisers import kind_of
from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.model_checks import require_plan
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.shard import check_shard
from para_core.adapters.weights.staged_transformer import StageChange
from para_core.attention.attention_options import AttnOptions
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import guided_mesh
from para_core.plans.apply import apply_plan
from para_core.plans.region import mesh_of_plan
from para_core.weights.fsdp import shard_blocks
from para_core.weights.group import weights_mesh
from para_core.weights.tensor import shard_tensors
from tests.adapters.compatibility.test_wrappers import by_fsdp1
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines.image import stable_diffusion_3
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.transformers.registry import MODELS

SUPPORTED = r"docs/pipelines\.md"


class NoTransformer(DiffusionPipeline):
    def __init__(self, prior):
        super().__init__()
        self.register_modules(prior=prior)


class OtherUnet(DiffusionPipeline):
    def __init__(self, unet):
        super().__init__()
        self.register_modules(unet=unet)


class OtherTransformer(DiffusionPipeline):
    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)


def lumina_next():
    """Return a model whose processor scales attention by the number of tokens."""
    return LuminaNextDiT2DModel(
        hidden_size=16, num_layers=1, num_attention_heads=2, num_kv_heads=1, cross_attention_dim=8
    )


def test_pipe_without_transformer_is_refused():
    with pytest.raises(TypeError, match=r"^NoTransformer .*transformer.*" + SUPPORTED):
        parallelize_pipe(NoTransformer(nn.Linear(1, 1)))


def test_unknown_unet_is_refused():
    with pytest.raises(TypeError, match=r"^OtherUnet .* Linear .*Stable Diffusion XL"):
        parallelize_pipe(OtherUnet(nn.Linear(1, 1)))


class OtherModel(ModelMixin, ConfigMixin):
    """A model without an adapter."""


@pytest.mark.parametrize("function", [parallelize_pipe, apply_cache_on_pipe, shard_weights], ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    ("given", "named"), [(None, "None"), ("a/path", "str"), (OtherTransformer, "OtherTransformer"), ({}, "dict")]
)
def test_what_is_no_pipeline_is_named(function, given, named):
    with pytest.raises(TypeError, match=rf"pipeline.* {named}\b"):
        function(given)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("WanMoveTransformer3DModel", "Wan"),
        ("ChronoEdit2Pipeline", "ChronoEdit"),
        ("MiniMaxH4Transformer3DModel", "MiniMax-H3"),
        ("StableDiffusionXLRefinerPipeline", "Stable Diffusion"),
    ],
)
def test_closest_supported_names_are_few_and_begin_with_the_nearest(name, closest):
    names = closest_supported(name)
    assert names.split("; ")[0].startswith(closest)
    assert names.count("; ") == 4
    assert len(names) < 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lumina_next,
            "LuminaNextDiT2DModel .*processor ",
        ),
        (
            OtherModel,
            r"OtherModel\. .*adapter=Adapter\(transformer='OtherModel', .*plan=Plan\(.*docs/new_model\.md",
        ),
    ],
)
def test_unsupported_transformer_is_refused_with_a_list(make, message):
    model = make()
    for attempt, target in ((parallelize_pipe, OtherTransformer(model)), (parallelize_transformer, model)):
        expected = f"^{type(target).__name__} .*{message}.*{SUPPORTED}"
        with pytest.raises(TypeError, match=expected) as error:
            attempt(target)
        # The token dim depends on the model. In most image models dim 1 has the channels.
        assert "dim=1" not in str(error.value)


def test_a_transformer_spread_over_devices_is_refused():
    pipe = flux_pipe()
    pipe.transformer.hf_device_map = {"transformer_blocks": 0, "single_transformer_blocks": 1}
    with pytest.raises(ValueError, match=r"\['0', '1'\] .*device_map"):
        parallelize_pipe(pipe)
    pipe.transformer.hf_device_map = {"": 0}
    parallelize_pipe(pipe)


def test_diffusers_own_parallelism_is_refused():
    pipe = flux_pipe()
    pipe.transformer._parallel_config = object()
    with pytest.raises(ValueError, match=r"diffusers.* enable_parallelism"):
        parallelize_pipe(pipe)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"mesh .*int; .*DeviceMesh .*ProcessGroup"):
        parallelize_pipe(flux_pipe(), mesh=2)


class HandMadeProcessor(FluxAttnProcessor):
    """Attention that no torch mode can intercept, like that of a flash_attn kernel."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        tokens = hidden_states
        if encoder_hidden_states is not None:
            tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        out = torch.softmax(tokens @ tokens.mT, dim=-1) @ tokens
        if encoder_hidden_states is None:
            return out
        text = encoder_hidden_states.shape[1]
        return out[:, text:], out[:, :text]


UNSEEN = "HandMadeProcessor.* 2 ranks .*scaled_dot_product_attention"


def attend_unseen(compiled):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    processors = {name: part.processor for name, part in pipe.transformer.named_modules() if hasattr(part, "processor")}
    assert processors
    for name in processors:
        pipe.transformer.get_submodule(name).set_processor(HandMadeProcessor())
    if compiled == "blocks":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    if compiled == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=UNSEEN) as error:
        pipe(**flux_call())
    for name, processor in processors.items():
        getattr(pipe.transformer, "_orig_mod", pipe.transformer).get_submodule(name).set_processor(processor)
    return isinstance(error.value, RuntimeError), pipe(**flux_call()).images


@pytest.mark.long
@pytest.mark.parametrize("compiled", ["no", *[pytest.param(x, marks=pytest.mark.long) for x in ("blocks", "whole")]])
@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_unseen_attention_raises_on_every_rank(rank_pool, compiled):
    expected = flux_pipe()(**flux_call()).images
    for is_runtime_error, out in rank_pool.run(attend_unseen, 2, compiled):
        assert is_runtime_error
        assert relative_error(out, expected) < 1e-5


# The reference images have 4 tokens. The first step of a pipeline passes the mode only.
REFERENCE = [{"kv_cache_mode": "extract", "num_ref_tokens": 4}, {"kv_cache_mode": "cached", "kv_cache": object()}]


def give_kv_cache(index):
    model, given = MODELS["flux2"], REFERENCE[index]
    inputs = model.inputs(3, 6, 10)
    transformer = model.build()
    with torch.no_grad():
        expected = transformer(**inputs).sample
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^Flux2Transformer2DModel .*kv_cache_mode, .*unparallelize_pipe"):
                transformer(**inputs, **given)
            assert relative_error(transformer(**inputs).sample, expected) < 1e-5
            # A compiled call raises the same error, not one of Dynamo.
            transformer.compile(backend="eager", fullgraph=True)


@pytest.mark.parametrize("index", range(len(REFERENCE)))
def test_keys_of_reference_images_are_refused(rank_pool, index):
    rank_pool.run(give_kv_cache, 2, index)


def replace_transformer():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe.transformer = flux_transformer()
    with pytest.raises(RuntimeError, match=r"pipe\.transformer .*another .*parallelized"):
        pipe(**flux_call())
    assert type(pipe.transformer) is FluxTransformer2DModel
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    return pipe(**flux_call()).images


def test_transformer_replaced_later_is_refused(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for out in rank_pool.run(replace_transformer, 2):
        assert relative_error(out, expected) < 1e-5


def perturb():
    pipe = stable_diffusion_3("StableDiffusion3PAGPipeline")
    with pytest.raises(
        TypeError,
        match=r"StableDiffusion3PAGPipeline .*perturbed ",
    ):
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2)["ring"])


def test_perturbed_attention_over_joint_tokens_is_refused(rank_pool):
    rank_pool.run(perturb, 2)


def changed(thing, **attributes):
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


def case(owner, module, component="", *, mesh=None, options=None, **of_model):
    return CheckedModel(owner, module, component, kind=kind_of(module), **of_model), mesh, options


def run(phase, model, mesh, options):
    if phase is check_shard:
        check_shard(model.owner)
    elif phase in (check_cache, check_cached_call):
        phase(model, options)
    else:
        phase([model], mesh)


def on_flux(change, mesh, **options):
    """Return the case of a pipe whose transformer is changed by ``change`` after its plan was applied."""
    pipe = flux_pipe()
    pipe.transformer = change(pipe.transformer) or pipe.transformer
    return case(pipe, pipe.transformer, "transformer", mesh=mesh, **options)


def replaced(mesh):
    return case(flux_pipe(), flux_transformer(), "transformer", mesh=mesh)


def guided_by_blur(mesh):
    pipe = flux_pipe()
    pipe.guider = SmoothedEnergyGuidance(seg_guidance_layers=[1])
    return case(pipe, pipe.transformer, "transformer", mesh=mesh)


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def other_attention(query, key, value, **options):
    """Return SDPA's result, as a function that a user has put in place of SDPA."""
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, **options)


def without_scheduler(mesh):
    pipe = changed(flux_pipe(), scheduler=None)
    return case(pipe, pipe.transformer, options=CacheOptions(0.1, always_compute_last=True))


def perturbed(mesh):
    pipe = changed(flux_pipe(), pag_applied_layers=["blocks.1"])
    return case(pipe, MODELS["sd3"].build(), "transformer", mesh=mesh)


def sharded_and_cached(mesh):
    pipe = flux_pipe()
    shard_blocks(pipe.transformer, blocks_of(pipe.transformer), weights_mesh([0, 1], "cpu"))
    return case(pipe, pipe.transformer, "transformer", options=CacheOptions(0.1))


def in_stages(mesh):
    return replace(mesh, pipe=mesh.sequence.ulysses)


def compiled_stages(mesh):
    """Compile the blocks in place after they were split into stages."""
    pipe = flux_pipe()
    StageChange(pipe, pipe.transformer, in_stages(mesh), None).apply()
    return case(pipe, compiled_in_place(pipe.transformer), "transformer", mesh=in_stages(mesh))


def fused_and_compiled(mesh):
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())
    return case(pipe, compiled_in_place(pipe.transformer), "transformer", mesh=mesh, applied=mesh.sequence)


def cached_stages(mesh):
    pipe = flux_pipe()
    StageChange(pipe, pipe.transformer, in_stages(mesh), None).apply()
    return case(pipe, pipe.transformer, "transformer", options=CacheOptions(0.1, rule="modulated_input"))


def sharded_and_compiled(mesh):
    pipe = flux_pipe()
    shard_tensors(pipe.transformer, tensor_plan_for(pipe.transformer), weights_mesh([0, 1], "cpu"))
    module, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
    return case(pipe, module, "transformer", mesh=mesh, options=CacheOptions(0.1))


def fsdp_without_breaks(mesh):
    pipe = flux_pipe()
    shard_blocks(pipe.transformer, blocks_of(pipe.transformer), weights_mesh([0, 1], "cpu"))
    module, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    return case(pipe, module, "transformer", mesh=mesh)


def sharded_before_stages(mesh):
    pipe = flux_pipe()
    shard_blocks(pipe.transformer, blocks_of(pipe.transformer), weights_mesh([0, 1], "cpu"))
    return case(pipe, pipe.transformer, "transformer", mesh=in_stages(mesh))


def sharded_cached_and_compiled(mesh):
    pipe = flux_pipe()
    shard_blocks(pipe.transformer, blocks_of(pipe.transformer), weights_mesh([0, 1], "cpu"))
    apply_plan(pipe.transformer, require_plan(pipe.transformer, pipe.transformer, None), mesh.sequence)
    module, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
    return case(pipe, module, "transformer", mesh=mesh, options=CacheOptions(0.1))


def fused_and_cached(mesh):
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())
    return case(pipe, pipe.transformer, "transformer", options=CacheOptions(0.1))


def compiled_gguf(mesh):
    pipe = flux_pipe()
    # diffusers sets this attribute. A file needs the package gguf: tests/weights/test_quantized_files.py.
    pipe.transformer.hf_quantizer = type("GGUFQuantizer", (), {})()
    pipe.transformer.transformer_blocks[0].compile(backend="eager")
    return case(pipe, pipe.transformer, "transformer", mesh=mesh)


def quantized_late(mesh):
    pipe = flux_pipe()
    shard_blocks(pipe.transformer, blocks_of(pipe.transformer), weights_mesh([0, 1], "cpu"))
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    linear.weight = nn.Parameter(Int8Tensor.from_hp(torch.ones(64, 64), PerRow()), requires_grad=False)
    return case(pipe, pipe.transformer, "transformer", mesh=mesh)


# Each check has a phase that runs it, a case that it refuses, and the message.
def named_twice(model, mesh):
    apply_plan(model, require_plan(model, model, None), mesh.sequence, options=AttnOptions(backend="math"))
    for submodule in model.modules():
        if hasattr(getattr(submodule, "processor", None), "_attention_backend"):
            submodule.processor._attention_backend = "flash"


def with_freeu(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return pipe


CASES = {
    "check_has_transformer": (
        check_parallelize,
        lambda _: case(NoTransformer(nn.Linear(1, 1)), None),
        "^NoTransformer .*transformer.*" + SUPPORTED,
    ),
    "check_cache_has_transformer": (
        check_cache,
        lambda _: case(NoTransformer(nn.Linear(1, 1)), None),
        "^NoTransformer .*cached.* transformer",
    ),
    "refuse_unsupported_unet": (
        check_parallelize,
        lambda _: case(OtherUnet(nn.Linear(1, 1)), nn.Linear(1, 1), "unet"),
        "^OtherUnet .* Linear ",
    ),
    "check_not_fsdp1": (
        check_parallelize,
        lambda _: case(*[by_fsdp1(flux_transformer())] * 2),
        r"^transformer .*FSDP1.*FluxTransformer2DModel.*weights='fsdp'",
    ),
    "check_not_wrapped": (
        check_parallelize,
        lambda _: case(*[nn.DataParallel(flux_transformer())] * 2),
        r"^transformer .*DataParallel .*FluxTransformer2DModel.*transformer = transformer\.module",
    ),
    "refuse_replaced_attention": (
        check_parallel_call,
        lambda mesh: case(flux_pipe(), flux_transformer(), mesh=mesh),
        r"replaced by tests\.adapters\.compatibility\.test_checks\.other_attention.* 2 ranks.*attn_func=",
    ),
    "check_no_tensor_ranks_of_unet": (
        check_parallelize,
        lambda mesh: case(
            *[UNET_PIPELINES["sd"].build().unet] * 2, "unet", mesh=replace(mesh, tensor=mesh.sequence.ulysses)
        ),
        r"^.* 2 ranks .*'tensor'.*UNet2DConditionModel .*'ulysses'",
    ),
    "check_cache_not_on_unet": (
        check_cache,
        lambda _: case(*[UNET_PIPELINES["sd"].build().unet] * 2),
        "^UNet2DConditionModel .*First Block Cache",
    ),
    "check_adapter_type": (
        check_parallelize,
        lambda _: case(flux_pipe(), flux_transformer(), adapter={}),
        r"^adapter .*\{\}; .*Adapter, .*transformer='FluxTransformer2DModel'",
    ),
    "check_class_has_plan": (
        check_parallelize,
        lambda _: case(lumina_next(), lumina_next()),
        "^LuminaNextDiT2DModel .*processor ",
    ),
    "refuse_missing_plan": (
        check_parallelize,
        lambda _: case(OtherModel(), OtherModel()),
        r"OtherModel\. .*adapter=Adapter\(transformer='OtherModel', ",
    ),
    "check_blocks_can_be_skipped": (
        check_cache,
        lambda _: case(far := MODELS["anyflow far"].build(), far),
        "^AnyFlowFARTransformer3DModel .*cached.* keys",
    ),
    "check_blocks_are_described": (
        check_cache,
        lambda _: case(OtherModel(), OtherModel()),
        r"^OtherModel .*cached.* blocks .*adapter=Adapter\(",
    ),
    "check_has_scheduler": (
        check_cached_call,
        without_scheduler,
        "^always_compute_last .*scheduler, .*FluxPipeline ",
    ),
    "check_one_device": (
        check_shard,
        lambda mesh: case(changed(flux_pipe(), hf_device_map={"a": 0, "b": 1}), flux_transformer(), "transformer"),
        r"pipeline .*\['0', '1'\] .*device_map, .*mesh=mesh, weights='fsdp'\)",
    ),
    "check_unmoved_weights": (
        check_shard,
        lambda mesh: on_flux(lambda model: changed(model, _hf_hook=object()), mesh),
        r"^pipe\.transformer .*accelerate, .*pipe\.remove_all_hooks\(\)",
    ),
    "check_chained_blocks": (
        check_parallelize,
        lambda mesh: case(*[MODELS["hunyuandit"].build()] * 2, mesh=in_stages(mesh)),
        r"^HunyuanDiT2DModel .*stages.*weights='fsdp'",
    ),
    "check_moved_weights": (
        check_parallelize,
        lambda mesh: on_flux(lambda model: changed(model.proj_out, _hf_hook=object()) and None, in_stages(mesh)),
        r"^pipe\.transformer .*accelerate, .*pipe\.remove_all_hooks\(\)",
    ),
    "check_sharded_weights": (
        check_parallelize,
        sharded_before_stages,
        r"^pipe\.transformer .*sharded, .*stage .*Load the pipeline again \(from_pretrained\)",
    ),
    "check_cached_graph_of_shards": (
        check_cached_call,
        sharded_cached_and_compiled,
        r"^pipe\.transformer .*compiled .*\(weights='fsdp'\).*compile_repeated_blocks\(fullgraph=True\)",
    ),
    "check_cache_under_pipefusion": (
        check_cached_call,
        fused_and_cached,
        r"^pipe\.transformer .*cached: .*PipeFusion .*remove_cache_from_pipe\(pipe\)",
    ),
    "check_compiled_stages": (
        check_parallel_call,
        compiled_stages,
        r"^pipe\.transformer .*compiled .*transformer\.compile_repeated_blocks\(fullgraph=True\)",
    ),
    "check_compiled_pipefusion": (
        check_parallel_call,
        fused_and_compiled,
        r"^pipe\.transformer .*PipeFusion, .*compile_repeated_blocks\(fullgraph=True\)",
    ),
    "check_cache_on_stages": (
        check_cached_call,
        cached_stages,
        r"^pipe\.transformer .*stages, .*cached.* rule ",
    ),
    "check_shards_in_sequence": (
        check_cached_call,
        sharded_and_cached,
        r"^pipe\.transformer .*weights .*2 ranks, .* 1\W.*cache",
    ),
    "check_cached_graph_of_tensors": (
        check_cached_call,
        sharded_and_compiled,
        r"^pipe\.transformer .*compiled .*\(weights='tensor'\).*compile_repeated_blocks\(fullgraph=True\)",
    ),
    "check_fullgraph_of_shards": (
        check_parallel_call,
        fsdp_without_breaks,
        r"^pipe\.transformer .*fullgraph=True, .*\(weights='fsdp'\).*compile_repeated_blocks",
    ),
    "check_compiled_weights_of_diffusers": (
        check_parallel_call,
        compiled_gguf,
        r"^pipe\.transformer .*GGUF .*compiled.*pipe\.transformer\.dequantize\(\)",
    ),
    "check_late_quantization": (
        check_parallel_call,
        quantized_late,
        r"^transformer_blocks\.0\.attn\.to_q\.weight .*pipe\.transformer .*Int8Tensor ",
    ),
    "check_tensor_ranks": (
        check_parallel_call,
        lambda mesh: on_flux(
            lambda model: None, replace(mesh, tensor=mesh.sequence.ulysses), applied=mesh_of_plan(flux_transformer())
        ),
        r"^pipe\.transformer .*heads .*no ranks, .*'tensor' .*\[0, 1\]",
    ),
    "check_no_parallelism_of_diffusers": (
        check_parallelize,
        lambda mesh: on_flux(lambda model: changed(model, _parallel_config=object()), mesh),
        "diffusers.* enable_parallelism",
    ),
    "check_pipeline_of_model": (
        check_parallelize,
        perturbed,
        "perturbed attention",
    ),
    "check_model_not_replaced": (
        check_parallel_call,
        replaced,
        r"^pipe\.transformer .*another .*parallelized",
    ),
    "check_cached_model_not_replaced": (
        check_cached_call,
        replaced,
        r"^pipe\.transformer .*another .*cache",
    ),
    "check_mesh_not_replaced": (
        check_parallel_call,
        lambda mesh: on_flux(lambda _: None, mesh, applied=mesh.sequence),
        r"^pipe\.transformer .*mesh, .*unparallelized",
    ),
    "check_unet_not_compiled": (
        check_parallel_call,
        lambda mesh: case(*[compiled_in_place(UNET_PIPELINES["sd"].build().unet)] * 2, mesh=mesh),
        "^unet .*compiled",
    ),
    "check_no_freeu": (
        check_parallel_call,
        lambda mesh: case(*[with_freeu(UNET_PIPELINES["sd"].build()).unet] * 2, mesh=mesh),
        r"^unet .*FreeU.* pipe\.disable_freeu\(\)",
    ),
    "check_attention_is_seen": (
        check_parallel_call,
        lambda mesh: on_flux(
            lambda model: changed(model.transformer_blocks[1].attn.processor, _attention_backend="flash_hub") and None,
            mesh,
        ),
        r"'flash_hub' .*'transformer_blocks\.1\.attn', .*2 ranks .*: pipe\.transformer\.set_attention_backend",
    ),
    "check_one_attention_backend": (
        check_parallel_call,
        lambda mesh: on_flux(
            lambda model: changed(model.transformer_blocks[1].attn.processor, _attention_backend="flash") and None, mesh
        ),
        r"'flash' .*'transformer_blocks\.1\.attn' .*'native' .*pipe\.transformer\.set_attention_backend",
    ),
    "check_attention_named_once": (
        check_parallel_call,
        lambda mesh: on_flux(lambda model: named_twice(model, mesh), mesh, applied=mesh.sequence),
        r"'flash' .*backend='math'.*pipe\.transformer\.set_attention_backend",
    ),
    "check_no_cache_of_diffusers": (
        check_parallel_call,
        lambda mesh: on_flux(lambda model: model.enable_cache(FirstBlockCacheConfig(0.1)), mesh),
        r"\(FirstBlockCacheConfig\), .* pipe\.transformer\.disable_cache\(\)",
    ),
    "check_no_second_cache": (
        check_cache,
        lambda mesh: on_flux(lambda model: apply_cache_on_transformer(model, residual_diff_threshold=0.1), mesh),
        r"pipe\.transformer .*remove_cache\(pipe\.transformer\)",
    ),
    "check_hooks_of_diffusers": (
        check_parallel_call,
        lambda mesh: on_flux(lambda model: apply_layer_skip(model, LayerSkipConfig([1], dropout=0.5)), mesh),
        r"^pipe\.transformer .*diffusers.* \w+ at '.*': .*drops",
    ),
    "check_guider": (
        check_parallel_call,
        guided_by_blur,
        r"^pipe\.guider .*SmoothedEnergyGuidance: .*blurs",
    ),
}


def all_checks():
    return {check.__name__: check for phase in PHASES.values() for check in checks_of(phase)}


@pytest.mark.parametrize("name", all_checks())
def test_each_check_has_a_case(name):
    phase, make, message = CASES[name]
    check = all_checks()[name]
    assert check in checks_of(phase)
    # Only this check reads torch's function.
    attention = other_attention if name == "refuse_replaced_attention" else F.scaled_dot_product_attention
    with fake_group(2), mock.patch.object(F, "scaled_dot_product_attention", attention):
        of_case = make(guided_mesh(cpu_mesh(1, 2)))
        with pytest.raises(getattr(builtins, errors_of(check)[0]), match=message) as caught:
            run(phase, *of_case)
    assert caught.traceback[-1].name == check.__name__


def test_untouched_pipelines_are_not_refused():
    with fake_group(2):
        mesh = guided_mesh(cpu_mesh(1, 2))
        for pipe in (flux_pipe(), stable_diffusion_3("StableDiffusion3Pipeline")):
            for phase in PHASES.values():
                for model in models_to_check(pipe):
                    run(phase, model, mesh, CacheOptions(0.1))
