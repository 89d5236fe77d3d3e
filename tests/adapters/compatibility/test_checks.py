"""Configurations that cannot run in parallel raise on every rank and say what to do instead."""

import builtins
import copy
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, LuminaNextDiT2DModel, ModelMixin
from diffusers.guiders import SmoothedEnergyGuidance
from diffusers.hooks import FirstBlockCacheConfig, LayerSkipConfig, apply_layer_skip
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchao.quantization import Int8Tensor, PerRow

from benchmarks.harness import fake_group
from benchmarks.refusals import PHASES, checks_of, errors_of
from para_core import PipeFusion
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
    propose_plan,
    shard_weights,
)
from para_core.adapters.adapter import Adapter
from para_core.adapters.cache.checks import check_cache, check_cached_call
from para_core.adapters.closest_names import closest_supported
from para_core.adapters.compatibility.checks import CheckedModel, models_to_check
from para_core.adapters.denoisers import kind_of
from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.model_checks import require_plan
from para_core.adapters.registry import adapter_for, tensor_plan_for
from para_core.adapters.weights.shard import check_can_be_sharded
from para_core.adapters.weights.staged_transformer import StageChange
from para_core.attention.attention_options import AttnOptions
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import guided_mesh
from para_core.plans.apply import apply_plan
from para_core.plans.region import mesh_of_plan
from para_core.weights.fsdp import shard_blocks
from para_core.weights.group import weights_mesh
from para_core.weights.tensor import shard_tensors
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer
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


@pytest.mark.parametrize(
    ("name", "closest"),
    [("WanMoveTransformer3DModel", "Wan"), ("ChronoEdit2Pipeline", "ChronoEdit"), ("MiniMaxH4Model", "MiniMax-H3")],
    ids=["WanTransformer3DModel", "ChronoEditTransformer3DModel", "MiniMaxH3Transformer3DModel"],
)
def test_closest_supported_names_are_few_and_begin_with_the_nearest(name, closest):
    names = closest_supported(name)
    assert names.startswith(closest) and names.count("; ") == 4 and len(names) < 200


def test_unsupported_models_are_refused_with_a_list():
    for function, model, message in (
        (parallelize_pipe, Parts(unet=nn.Linear(1, 1)), "^Parts .* Linear .*Stable Diffusion XL"),
        (parallelize_pipe, Parts(transformer=OtherModel()), "^Parts .*" + OTHER),
        (parallelize_transformer, OtherModel(), OTHER),
    ):
        with pytest.raises(TypeError, match=message):
            function(model)


@pytest.mark.parametrize("more", [{"kv_cache_mode": "extract", "num_ref_tokens": 4}, {"kv_cache_mode": "cached"}])
def test_keys_of_reference_images_are_refused(more):
    with fake_group(2), torch.no_grad():
        transformer = parallelize_transformer(MODELS["flux2"].build(), mesh=cpu_mesh(1, 2))
        with pytest.raises(ValueError, match=r"^Flux2Transformer2DModel .*kv_cache_mode, .*unparallelize_pipe"):
            transformer(**MODELS["flux2"].inputs(3, 6, 10), **more)


# -- A model inside a training wrapper.


class Engine(nn.Module):
    """A wrapper from a library that is not installed here."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def by_ddp(module):
    return nn.parallel.DistributedDataParallel(module.requires_grad_())


def by_fsdp1(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def test_every_function_refuses_wrapped_models():
    with fake_group(2):
        mesh, pipe, other = cpu_mesh(1, 2), flux_pipe(transformer=Engine(flux_transformer())), flux_pipe()
        # A wrapped transformer with its own component name would otherwise be left out.
        other.transformer_ref = by_ddp(flux_transformer())
        for call, part in (
            (partial(parallelize_pipe, pipe, mesh=mesh), "transformer"),
            (partial(parallelize_transformer, pipe.transformer, mesh=mesh), "transformer"),
            (partial(apply_cache_on_pipe, pipe), "transformer"),
            (partial(shard_weights, pipe, mesh), "transformer"),
            (partial(propose_plan, pipe.transformer, {}), "transformer"),
            (partial(parallelize_pipe, other, mesh=mesh), r"pipe\.transformer_ref"),
            (partial(parallelize_vae, by_ddp(copy.deepcopy(pipe.vae)), mesh=mesh), "vae"),
            (partial(parallelize_unet, by_ddp(unet()), mesh=mesh), "unet"),
        ):
            with pytest.raises(TypeError, match=rf"{part}\.module$"):
                call()


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
    if phase is check_can_be_sharded:
        check_can_be_sharded(model.owner)
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


def staged_pipe(mesh, adapter=None):
    pipe = flux_pipe()
    StageChange(pipe, pipe.transformer, in_stages(mesh), None, adapter).apply()
    return pipe


def with_two_groups():
    adapter = adapter_for(flux_pipe().transformer)
    return replace(adapter, blocks=replace(adapter.blocks, groups=adapter.blocks.groups[:1] * 2))


def fused():
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


def cache(model):
    model.enable_cache(FirstBlockCacheConfig(0.1))


def on_tensor_ranks(mesh):
    return replace(mesh, tensor=mesh.sequence.ulysses)


def compiled_blocks(pipe, mesh, **of_case):
    return of_pipe(pipe, compiled_in_place(pipe.transformer), mesh=mesh, **of_case)


with_hook = partial(changed, _hf_hook=object())
DROP = partial(apply_layer_skip, config=LayerSkipConfig([1], dropout=0.5))
SEG = SmoothedEnergyGuidance(seg_guidance_layers=[1])
CACHE, LAST = CacheOptions(0.1), CacheOptions(0.1, always_compute_last=True)
UNCACHED = Adapter("OtherModel", "", uncached="its blocks store keys")
OF_INPUT, PAG = CacheOptions(0.1, rule="modulated_input"), "StableDiffusion3PAGPipeline"
BLOCKS = r".*compile_repeated_blocks\(fullgraph=True\)"
FSDP1 = r"^transformer .*(FSDP1|FullyShardedDataParallel).*FluxTransformer2DModel.*weights='fsdp'"
WRAPPED = r"\b.*FluxTransformer2DModel.*transformer = .*transformer\.module"
BACKEND = r".*pipe\.transformer\.set_attention_backend"
SPLIT = {"hf_device_map": {"a": 0, "b": 1}}
BALANCED = r"\['0', '1'\].*parallelize_pipe\(pipe, mesh=mesh, weights='fsdp'\)"
LUMINA = "^LuminaNextDiT2DModel .*processor .*" + SUPPORTED
OTHER = r"OtherModel\. .*adapter=Adapter\(transformer='OtherModel', .*docs/new_model\.md.*" + SUPPORTED
# Each check has cases that it refuses, and words of the message. A case of one model family names its transformer.
CASES = {
    "has_transformer": (lambda _: case(None, Parts(prior=nn.Linear(1, 1))), "^Parts .*transformer.*" + SUPPORTED),
    "not_fsdp1": (lambda _: case(by_fsdp1(flux_transformer())), FSDP1),
    "not_wrapped": (lambda _: case(nn.DataParallel(flux_transformer())), "DataParallel" + WRAPPED),
    "not_wrapped, twice": (lambda _: case(Engine(nn.DataParallel(flux_transformer()))), f"Engine{WRAPPED}.module$"),
    "no_tensor_ranks_of_unet": (lambda mesh: case(unet(), component="unet", mesh=on_tensor_ranks(mesh)), "'tensor'"),
    "adapter_type": (lambda _: case(flux_transformer(), flux_pipe(), adapter={}), r"\{\}; .*Adapter, .*transformer="),
    "class_has_plan": (lambda _: case(lumina_next()), LUMINA),
    "has_stages, HunyuanDiT2DModel": (
        lambda mesh: case(MODELS["hunyuandit"].build(), mesh=in_stages(mesh)),
        "weights='fsdp'",
    ),
    "moved_weights": (
        lambda mesh: of_pipe(pipe_with(lambda model: with_hook(model.proj_out)), mesh=in_stages(mesh)),
        r"pipe\.remove_all_hooks\(\)",
    ),
    "sharded_weights": (  # The user has sharded the blocks, and not the model around them.
        lambda mesh: of_pipe(pipe_with(lambda model: [*map(fully_shard, blocks_of(model))]), mesh=in_stages(mesh)),
        "sharded, .*stage .*from_pretrained",
    ),
    "no_parallelism_of_diffusers": (
        lambda mesh: of_pipe(pipe_with(lambda model: changed(model, _parallel_config=object())), mesh=mesh),
        "enable_parallelism",
    ),
    "pipeline_of_model, SD3Transformer2DModel": (
        lambda mesh: of_pipe(stable_diffusion_3(PAG), mesh=mesh),
        f"{PAG} .*perturbed ",
    ),
    "replaced_attention": (
        lambda mesh: case(flux_transformer(), flux_pipe(), mesh=mesh),
        r"replaced by tests\.adapters\.compatibility\.test_checks\.other_attention.* 2 ranks.*attn_func=",
    ),
    "compiled_stages": (lambda mesh: compiled_blocks(staged_pipe(mesh), in_stages(mesh)), "compiled" + BLOCKS),
    "compiled_pipefusion": (lambda mesh: compiled_blocks(fused(), mesh, applied=mesh.sequence), "PipeFusion" + BLOCKS),
    "fullgraph_of_shards": (
        lambda mesh: of_pipe(fsdp_pipe(), compiled={"fullgraph": True}, mesh=mesh),
        r"fullgraph=True, .*\(weights='fsdp'\).*compile_repeated_blocks",
    ),
    "compiled_weights_of_diffusers": (lambda mesh: of_pipe(pipe_with(compiled_gguf), mesh=mesh), "GGUF .*dequantize"),
    "late_quantization": (quantized_late, r"^transformer_blocks\.0\.attn\.to_q\.weight .*Int8Tensor "),
    "tensor_ranks": (
        lambda mesh: of_pipe(flux_pipe(), mesh=on_tensor_ranks(mesh), applied=mesh_of_plan(flux_transformer())),
        r"^pipe\.transformer .*heads .*no ranks, .*'tensor' .*\[0, 1\]",
    ),
    "model_not_replaced": (lambda mesh: of_pipe(flux_pipe(), flux_transformer(), mesh=mesh), "another .*parallelized"),
    "mesh_not_replaced": (lambda mesh: of_pipe(flux_pipe(), mesh=mesh, applied=mesh.sequence), "mesh, .*unparallel"),
    "unet_not_compiled": (lambda mesh: case(compiled_in_place(unet()), mesh=mesh), "^unet .*compiled"),
    "no_freeu": (lambda mesh: case(unet_with_freeu(), mesh=mesh), r"^unet .*FreeU.* pipe\.disable_freeu\(\)"),
    "attention_is_seen": (lambda mesh: of_pipe(second_backend("flash_hub"), mesh=mesh), "'flash_hub' .*" + BACKEND),
    "one_attention_backend": (
        lambda mesh: of_pipe(second_backend("flash"), mesh=mesh),
        r"'flash' .*'transformer_blocks\.1\.attn' .*'native'" + BACKEND,
    ),
    "attention_named_once": (
        lambda mesh: of_pipe(named_twice(mesh), mesh=mesh, applied=mesh.sequence),
        "'flash' .*backend='math'" + BACKEND,
    ),
    "no_cache_of_diffusers": (lambda mesh: of_pipe(pipe_with(cache), mesh=mesh), r"Config\), .*disable_cache\(\)"),
    "hooks_of_diffusers": (lambda mesh: of_pipe(pipe_with(DROP), mesh=mesh), r"diffusers.* \w+ at '.*': .*drops"),
    "guider": (lambda mesh: of_pipe(changed(flux_pipe(), guider=SEG), mesh=mesh), r"^pipe\.guider .*Guidance: .*blurs"),
    "guider, second": (lambda mesh: of_pipe(changed(flux_pipe(), guider_2=SEG), mesh=mesh), r"^pipe\.guider_2 .*blurs"),
    "cache_has_transformer": (lambda _: case(None, Parts(prior=nn.Linear(1, 1))), "^Parts .*cached.* transformer"),
    "cache_not_on_unet": (lambda _: case(unet()), "^UNet2DConditionModel .*First Block Cache"),
    "blocks_can_be_skipped": (lambda _: case(OtherModel(), adapter=UNCACHED), "^OtherModel .*cached: .* keys"),
    "blocks_are_described": (lambda _: case(OtherModel()), r"^OtherModel .*cached.* blocks .*adapter=Adapter\("),
    "no_second_cache": (lambda _: of_pipe(pipe_with(apply_cache_on_transformer)), r"remove_cache\(pipe\.transformer\)"),
    "has_scheduler": (lambda _: of_pipe(changed(flux_pipe(), scheduler=None), options=LAST), "^always.*scheduler, "),
    "cached_graph_of_shards": (cached_fsdp, r"compiled .*\(weights='fsdp'\)" + BLOCKS),
    "cache_under_pipefusion": (lambda _: of_pipe(fused(), options=CACHE), r"PipeFusion .*remove_cache_from_pipe\("),
    "cache_on_stages": (lambda mesh: of_pipe(staged_pipe(mesh), options=OF_INPUT), "stages, .*cached.* rule "),
    "cache_on_stages, own adapter": (
        lambda mesh: of_pipe(staged_pipe(mesh, with_two_groups()), options=OF_INPUT),
        "stages, .*cached.* two block groups",
    ),
    "shards_in_sequence": (lambda _: of_pipe(fsdp_pipe(), options=CACHE), r"weights .*2 ranks, .* 1\W.*cache"),
    "cached_graph_of_tensors": (
        lambda mesh: of_pipe(tensor_pipe(), compiled={}, mesh=mesh, options=CACHE),
        r"^pipe\.transformer .*compiled .*\(weights='tensor'\)" + BLOCKS,
    ),
    "cached_model_not_replaced": (lambda _: of_pipe(flux_pipe(), flux_transformer()), "another .*cache"),
    "one_device": (lambda _: of_pipe(changed(flux_pipe(), **SPLIT)), BALANCED),
    "one_device, of the model": (lambda _: case(changed(unet(), **SPLIT)), "^unet .*" + BALANCED),
    "unmoved_weights": (lambda _: of_pipe(pipe_with(with_hook)), r"accelerate, .*pipe\.remove_all_hooks\(\)"),
}


def all_checks():
    """Return each check with the first phase that runs it, by its name without ``check_``."""
    found = [(check, phase) for phase in PHASES.values() for check in checks_of(phase)]
    return {check.__name__.removeprefix("check_"): (check, phase) for check, phase in reversed(found)}


@pytest.mark.parametrize("name", [*CASES, *sorted(all_checks().keys() - {name.partition(",")[0] for name in CASES})])
def test_each_check_has_a_case(name):
    check, phase = all_checks()[name.partition(",")[0]]
    make, message = CASES[name]
    # Only this check reads torch's function.
    attention = other_attention if name == "replaced_attention" else F.scaled_dot_product_attention
    with fake_group(2), mock.patch.object(F, "scaled_dot_product_attention", attention):
        model, mesh, options = make(guided_mesh(cpu_mesh(1, 2)))
        with pytest.raises(getattr(builtins, errors_of(check)[0]), match=message) as caught:
            run(phase if options is None else check_cached_call, model, mesh, options)
    assert caught.traceback[-1].name == check.__name__


def test_weights_with_copies_for_other_sequences_are_not_refused():
    with fake_group(4):
        shards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        pipe = pipe_with(lambda model: shard_blocks(model, blocks_of(model), shards))
        sequence = guided_mesh(cpu_mesh(1, 2, batch=2)).sequence
        apply_plan(pipe.transformer, require_plan(pipe.transformer, pipe.transformer, None), sequence)
        check_cached_call(models_to_check(pipe)[0], CACHE)


@pytest.mark.parametrize("cls", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_untouched_pipelines_are_not_refused(cls):
    pipe = flux_pipe() if cls.startswith("Flux") else stable_diffusion_3("StableDiffusion3Pipeline")
    with fake_group(2):
        mesh = cpu_mesh(1, 2)
        for phase in PHASES.values():
            for model in models_to_check(pipe):
                run(phase, model, guided_mesh(mesh), CACHE)
        if cls.startswith("SD3"):
            # Perturbed attention needs the tokens of one rank.
            parallelize_pipe(stable_diffusion_3(PAG), mesh=mesh["ring"])
