"""Configurations that cannot run in parallel raise on every rank and say what to do instead."""

import builtins
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, LuminaNextDiT2DModel, ModelMixin
from diffusers.guiders import SmoothedEnergyGuidance
from diffusers.hooks import FirstBlockCacheConfig, LayerSkipConfig, apply_layer_skip
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
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines.image import stable_diffusion_3
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.transformers.registry import MODELS

SUPPORTED = r"docs/pipelines\.md"


class Parts(DiffusionPipeline):
    """A pipeline of the given components."""

    def __init__(self, **components):
        super().__init__()
        self.register_modules(**components)


def lumina_next():
    """Return a model whose processor scales attention by the number of tokens."""
    return LuminaNextDiT2DModel(
        hidden_size=16, num_layers=1, num_attention_heads=2, num_kv_heads=1, cross_attention_dim=8
    )


class OtherModel(ModelMixin, ConfigMixin):
    """A model without an adapter."""


@pytest.mark.parametrize("function", [parallelize_pipe, apply_cache_on_pipe, shard_weights], ids=lambda x: x.__name__)
@pytest.mark.parametrize(("given", "named"), [(None, "None"), ("a/path", "str"), (Parts, "Parts"), ({}, "dict")])
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
    ("model", "message"),
    [
        (lumina_next, "LuminaNextDiT2DModel .*processor "),
        (OtherModel, r"OtherModel\. .*adapter=Adapter\(transformer='OtherModel', .*plan=Plan\(.*docs/new_model\.md"),
    ],
)
def test_unsupported_transformer_is_refused_with_a_list(model, message):
    transformer = model()
    for attempt, target in (
        (parallelize_pipe, Parts(transformer=transformer)),
        (parallelize_transformer, transformer),
    ):
        with pytest.raises(TypeError, match=f"^{type(target).__name__} .*{message}.*{SUPPORTED}") as error:
            attempt(target)
        # The token dim depends on the model. In most image models dim 1 has the channels.
        assert "dim=1" not in str(error.value)


def test_a_transformer_spread_over_devices_and_what_is_no_mesh_are_refused():
    pipe = flux_pipe()
    with pytest.raises(TypeError, match=r"mesh .*int; .*DeviceMesh .*ProcessGroup"):
        parallelize_pipe(pipe, mesh=2)
    pipe.transformer.hf_device_map = {"transformer_blocks": 0, "single_transformer_blocks": 1}
    with pytest.raises(ValueError, match=r"\['0', '1'\] .*device_map"):
        parallelize_pipe(pipe)
    pipe.transformer.hf_device_map = {"": 0}
    parallelize_pipe(pipe)


def give_kv_cache():
    """Call a model with the keys of reference images of 4 tokens. A pipeline's first step passes the mode only."""
    model = MODELS["flux2"]
    inputs, transformer = model.inputs(3, 6, 10), model.build()
    with torch.no_grad():
        expected = transformer(**inputs).sample
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        for keys in (
            {"kv_cache_mode": "extract", "num_ref_tokens": 4},
            {"kv_cache_mode": "cached", "kv_cache": object()},
        ):
            with pytest.raises(ValueError, match=r"^Flux2Transformer2DModel .*kv_cache_mode, .*unparallelize_pipe"):
                transformer(**inputs, **keys)
            assert relative_error(transformer(**inputs).sample, expected) < 1e-5
            # A compiled call raises the same error, not one of Dynamo.
            transformer.compile(backend="eager", fullgraph=True)


def test_keys_of_reference_images_are_refused(rank_pool):
    rank_pool.run(give_kv_cache, 2)


# -- One case for each check.


def case(module, owner=None, component="", *, mesh=None, options=None, **of_model):
    """Return a model to check, the mesh, and the options of a cache."""
    owner = module if owner is None else owner
    return CheckedModel(owner, module, component, kind=kind_of(module), **of_model), mesh, options


def of_pipe(pipe, module=None, *, compiled=None, **of_case):
    """Return the case of a pipeline, whose transformer is compiled with the options ``compiled``."""
    module = module or pipe.transformer
    if compiled is not None:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", **compiled)
    return case(module, pipe, "transformer", **of_case)


def run(phase, model, mesh, options):
    if phase is check_shard:
        check_shard(model.owner)
    elif phase in (check_cache, check_cached_call):
        phase(model, options)
    else:
        phase([model], mesh)


def changed(thing, **attributes):
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


def pipe_with(change):
    """Return a FLUX whose transformer was changed."""
    pipe = flux_pipe()
    change(pipe.transformer)
    return pipe


def unet():
    return UNET_PIPELINES["sd"].build().unet


def unet_with_freeu():
    pipe = UNET_PIPELINES["sd"].build()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return pipe.unet


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def other_attention(query, key, value, **options):
    """Return SDPA's result, as a function that a user has put in place of SDPA."""
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, **options)


def in_stages(mesh):
    return replace(mesh, pipe=mesh.sequence.ulysses)


def staged_pipe(mesh):
    pipe = flux_pipe()
    StageChange(pipe, pipe.transformer, in_stages(mesh), None).apply()
    return pipe


def fused_pipe():
    return parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())


def fsdp_pipe():
    return pipe_with(lambda model: shard_blocks(model, blocks_of(model), weights_mesh([0, 1], "cpu")))


def tensor_pipe():
    return pipe_with(lambda model: shard_tensors(model, tensor_plan_for(model), weights_mesh([0, 1], "cpu")))


def cached_fsdp(mesh):
    pipe = fsdp_pipe()
    apply_plan(pipe.transformer, require_plan(pipe.transformer, pipe.transformer, None), mesh.sequence)
    return of_pipe(pipe, compiled={}, mesh=mesh, options=CacheOptions(0.1))


def compiled_gguf(model):
    # diffusers sets this attribute. A file needs the package gguf: tests/weights/test_quantized_files.py.
    model.hf_quantizer = type("GGUFQuantizer", (), {})()
    model.transformer_blocks[0].compile(backend="eager")


def quantized_late(mesh):
    pipe = fsdp_pipe()
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    linear.weight = nn.Parameter(Int8Tensor.from_hp(torch.ones(64, 64), PerRow()), requires_grad=False)
    return of_pipe(pipe, mesh=mesh)


def second_backend(name):
    return pipe_with(lambda model: changed(model.transformer_blocks[1].attn.processor, _attention_backend=name))


def named_twice(mesh):
    pipe = flux_pipe()
    plan = require_plan(pipe.transformer, pipe.transformer, None)
    apply_plan(pipe.transformer, plan, mesh.sequence, options=AttnOptions(backend="math"))
    for submodule in pipe.transformer.modules():
        if hasattr(getattr(submodule, "processor", None), "_attention_backend"):
            submodule.processor._attention_backend = "flash"
    return pipe


CACHE = CacheOptions(0.1)
# Each phase has the checks that it runs. Each check has a case that it refuses, and words of the message.
CASES = {
    check_parallelize: {
        "check_has_transformer": (
            lambda _: case(None, Parts(prior=nn.Linear(1, 1))),
            "^Parts .*transformer.*" + SUPPORTED,
        ),
        "refuse_unsupported_unet": (
            lambda _: case(nn.Linear(1, 1), Parts(unet=nn.Linear(1, 1)), "unet"),
            "^Parts .* Linear .*Stable Diffusion XL",
        ),
        "check_not_fsdp1": (
            lambda _: case(by_fsdp1(flux_transformer())),
            r"^transformer .*FSDP1.*FluxTransformer2DModel.*weights='fsdp'",
        ),
        "check_not_wrapped": (
            lambda _: case(nn.DataParallel(flux_transformer())),
            r"^transformer .*DataParallel .*FluxTransformer2DModel.*transformer = transformer\.module",
        ),
        "check_no_tensor_ranks_of_unet": (
            lambda mesh: case(unet(), component="unet", mesh=replace(mesh, tensor=mesh.sequence.ulysses)),
            r"^.* 2 ranks .*'tensor'.*UNet2DConditionModel .*'ulysses'",
        ),
        "check_adapter_type": (
            lambda _: case(flux_transformer(), flux_pipe(), adapter={}),
            r"^adapter .*\{\}; .*Adapter, .*transformer='FluxTransformer2DModel'",
        ),
        "check_class_has_plan": (lambda _: case(lumina_next()), "^LuminaNextDiT2DModel .*processor "),
        "refuse_missing_plan": (
            lambda _: case(OtherModel()),
            r"OtherModel\. .*adapter=Adapter\(transformer='OtherModel', ",
        ),
        "check_chained_blocks": (
            lambda mesh: case(MODELS["hunyuandit"].build(), mesh=in_stages(mesh)),
            r"^HunyuanDiT2DModel .*stages.*weights='fsdp'",
        ),
        "check_moved_weights": (
            lambda mesh: of_pipe(
                pipe_with(lambda model: changed(model.proj_out, _hf_hook=object())), mesh=in_stages(mesh)
            ),
            r"^pipe\.transformer .*accelerate, .*pipe\.remove_all_hooks\(\)",
        ),
        "check_sharded_weights": (
            lambda mesh: of_pipe(fsdp_pipe(), mesh=in_stages(mesh)),
            r"^pipe\.transformer .*sharded, .*stage .*Load the pipeline again \(from_pretrained\)",
        ),
        "check_no_parallelism_of_diffusers": (
            lambda mesh: of_pipe(pipe_with(lambda model: changed(model, _parallel_config=object())), mesh=mesh),
            "diffusers.* enable_parallelism",
        ),
        "check_pipeline_of_model": (
            lambda mesh: of_pipe(stable_diffusion_3("StableDiffusion3PAGPipeline"), mesh=mesh),
            "StableDiffusion3PAGPipeline .*perturbed ",
        ),
    },
    check_parallel_call: {
        "check_replaced_attention": (
            lambda mesh: case(flux_transformer(), flux_pipe(), mesh=mesh),
            r"replaced by tests\.adapters\.compatibility\.test_checks\.other_attention.* 2 ranks.*attn_func=",
        ),
        "check_compiled_stages": (
            lambda mesh: of_pipe(pipe := staged_pipe(mesh), compiled_in_place(pipe.transformer), mesh=in_stages(mesh)),
            r"^pipe\.transformer .*compiled .*transformer\.compile_repeated_blocks\(fullgraph=True\)",
        ),
        "check_compiled_pipefusion": (
            lambda mesh: of_pipe(
                pipe := fused_pipe(), compiled_in_place(pipe.transformer), mesh=mesh, applied=mesh.sequence
            ),
            r"^pipe\.transformer .*PipeFusion, .*compile_repeated_blocks\(fullgraph=True\)",
        ),
        "check_fullgraph_of_shards": (
            lambda mesh: of_pipe(fsdp_pipe(), compiled={"fullgraph": True}, mesh=mesh),
            r"^pipe\.transformer .*fullgraph=True, .*\(weights='fsdp'\).*compile_repeated_blocks",
        ),
        "check_compiled_weights_of_diffusers": (
            lambda mesh: of_pipe(pipe_with(compiled_gguf), mesh=mesh),
            r"^pipe\.transformer .*GGUF .*compiled.*pipe\.transformer\.dequantize\(\)",
        ),
        "check_late_quantization": (
            quantized_late,
            r"^transformer_blocks\.0\.attn\.to_q\.weight .*pipe\.transformer .*Int8Tensor ",
        ),
        "check_tensor_ranks": (
            lambda mesh: of_pipe(
                flux_pipe(),
                mesh=replace(mesh, tensor=mesh.sequence.ulysses),
                applied=mesh_of_plan(flux_transformer()),
            ),
            r"^pipe\.transformer .*heads .*no ranks, .*'tensor' .*\[0, 1\]",
        ),
        "check_model_not_replaced": (
            lambda mesh: of_pipe(flux_pipe(), flux_transformer(), mesh=mesh),
            r"^pipe\.transformer .*another .*parallelized",
        ),
        "check_mesh_not_replaced": (
            lambda mesh: of_pipe(flux_pipe(), mesh=mesh, applied=mesh.sequence),
            r"^pipe\.transformer .*mesh, .*unparallelized",
        ),
        "check_unet_not_compiled": (lambda mesh: case(compiled_in_place(unet()), mesh=mesh), "^unet .*compiled"),
        "check_no_freeu": (
            lambda mesh: case(unet_with_freeu(), mesh=mesh),
            r"^unet .*FreeU.* pipe\.disable_freeu\(\)",
        ),
        "check_attention_is_seen": (
            lambda mesh: of_pipe(second_backend("flash_hub"), mesh=mesh),
            r"'flash_hub' .*'transformer_blocks\.1\.attn', .*2 ranks .*: pipe\.transformer\.set_attention_backend",
        ),
        "check_one_attention_backend": (
            lambda mesh: of_pipe(second_backend("flash"), mesh=mesh),
            r"'flash' .*'transformer_blocks\.1\.attn' .*'native' .*pipe\.transformer\.set_attention_backend",
        ),
        "check_attention_named_once": (
            lambda mesh: of_pipe(named_twice(mesh), mesh=mesh, applied=mesh.sequence),
            r"'flash' .*backend='math'.*pipe\.transformer\.set_attention_backend",
        ),
        "check_no_cache_of_diffusers": (
            lambda mesh: of_pipe(pipe_with(lambda model: model.enable_cache(FirstBlockCacheConfig(0.1))), mesh=mesh),
            r"\(FirstBlockCacheConfig\), .* pipe\.transformer\.disable_cache\(\)",
        ),
        "check_hooks_of_diffusers": (
            lambda mesh: of_pipe(
                pipe_with(lambda model: apply_layer_skip(model, LayerSkipConfig([1], dropout=0.5))), mesh=mesh
            ),
            r"^pipe\.transformer .*diffusers.* \w+ at '.*': .*drops",
        ),
        "check_guider": (
            lambda mesh: of_pipe(
                changed(flux_pipe(), guider=SmoothedEnergyGuidance(seg_guidance_layers=[1])), mesh=mesh
            ),
            r"^pipe\.guider .*SmoothedEnergyGuidance: .*blurs",
        ),
    },
    check_cache: {
        "check_cache_has_transformer": (
            lambda _: case(None, Parts(prior=nn.Linear(1, 1))),
            "^Parts .*cached.* transformer",
        ),
        "check_cache_not_on_unet": (lambda _: case(unet()), "^UNet2DConditionModel .*First Block Cache"),
        "check_blocks_can_be_skipped": (
            lambda _: case(MODELS["anyflow far"].build()),
            "^AnyFlowFARTransformer3DModel .*cached.* keys",
        ),
        "check_blocks_are_described": (
            lambda _: case(OtherModel()),
            r"^OtherModel .*cached.* blocks .*adapter=Adapter\(",
        ),
        "check_no_second_cache": (
            lambda _: of_pipe(pipe_with(lambda model: apply_cache_on_transformer(model, residual_diff_threshold=0.1))),
            r"pipe\.transformer .*remove_cache\(pipe\.transformer\)",
        ),
    },
    check_cached_call: {
        "check_has_scheduler": (
            lambda _: of_pipe(
                changed(flux_pipe(), scheduler=None), options=CacheOptions(0.1, always_compute_last=True)
            ),
            "^always_compute_last .*scheduler, .*FluxPipeline ",
        ),
        "check_cached_graph_of_shards": (
            cached_fsdp,
            r"^pipe\.transformer .*compiled .*\(weights='fsdp'\).*compile_repeated_blocks\(fullgraph=True\)",
        ),
        "check_cache_under_pipefusion": (
            lambda _: of_pipe(fused_pipe(), options=CACHE),
            r"^pipe\.transformer .*cached: .*PipeFusion .*remove_cache_from_pipe\(pipe\)",
        ),
        "check_cache_on_stages": (
            lambda mesh: of_pipe(staged_pipe(mesh), options=CacheOptions(0.1, rule="modulated_input")),
            r"^pipe\.transformer .*stages, .*cached.* rule ",
        ),
        "check_shards_in_sequence": (
            lambda _: of_pipe(fsdp_pipe(), options=CACHE),
            r"^pipe\.transformer .*weights .*2 ranks, .* 1\W.*cache",
        ),
        "check_cached_graph_of_tensors": (
            lambda mesh: of_pipe(tensor_pipe(), compiled={}, mesh=mesh, options=CACHE),
            r"^pipe\.transformer .*compiled .*\(weights='tensor'\).*compile_repeated_blocks\(fullgraph=True\)",
        ),
        "check_cached_model_not_replaced": (
            lambda _: of_pipe(flux_pipe(), flux_transformer()),
            r"^pipe\.transformer .*another .*cache",
        ),
    },
    check_shard: {
        "check_one_device": (
            lambda _: of_pipe(changed(flux_pipe(), hf_device_map={"a": 0, "b": 1})),
            r"pipeline .*\['0', '1'\] .*device_map, .*mesh=mesh, weights='fsdp'\)",
        ),
        "check_unmoved_weights": (
            lambda _: of_pipe(pipe_with(lambda model: changed(model, _hf_hook=object()))),
            r"^pipe\.transformer .*accelerate, .*pipe\.remove_all_hooks\(\)",
        ),
    },
}


def all_checks():
    return {check.__name__: check for phase in PHASES.values() for check in checks_of(phase)}


@pytest.mark.parametrize("name", all_checks())
def test_each_check_has_a_case(name):
    ((phase, (make, message)),) = [(phase, rows[name]) for phase, rows in CASES.items() if name in rows]
    check = all_checks()[name]
    assert check in checks_of(phase)
    # Only this check reads torch's function.
    attention = other_attention if name == "check_replaced_attention" else F.scaled_dot_product_attention
    with fake_group(2), mock.patch.object(F, "scaled_dot_product_attention", attention):
        of_case = make(guided_mesh(cpu_mesh(1, 2)))
        with pytest.raises(getattr(builtins, errors_of(check)[0]), match=message) as caught:
            run(phase, *of_case)
    assert caught.traceback[-1].name == check.__name__


def test_untouched_pipelines_are_not_refused():
    with fake_group(2):
        mesh = cpu_mesh(1, 2)
        for pipe in (flux_pipe(), stable_diffusion_3("StableDiffusion3Pipeline")):
            for phase in PHASES.values():
                for model in models_to_check(pipe):
                    run(phase, model, guided_mesh(mesh), CACHE)
        # Perturbed attention needs the tokens of one rank.
        parallelize_pipe(stable_diffusion_3("StableDiffusion3PAGPipeline"), mesh=mesh["ring"])
