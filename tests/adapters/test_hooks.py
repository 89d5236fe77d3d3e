"""diffusers' own hooks on a parallel pipeline give the result of one device, or an error before the call."""

import importlib
import inspect
import pkgutil
from functools import partial
from types import SimpleNamespace

import diffusers.hooks
import pytest
import torch
from diffusers.guiders import AutoGuidance, ClassifierFreeGuidance, SmoothedEnergyGuidance
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    HookRegistry,
    LayerSkipConfig,
    MagCacheConfig,
    ModelHook,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    SmoothedEnergyGuidanceConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
    apply_group_offloading,
    apply_layer_skip,
    apply_layerwise_casting,
)
from diffusers.hooks.smoothed_energy_guidance_utils import _apply_smoothed_energy_guidance_hook

from para_core.adapters import parallelize_pipe
from para_core.adapters.compatibility.diffusers_features import check_guider, hooks_of
from tests.adapters.test_pipelines import generate
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES


def _skip(transformer, **config):
    apply_layer_skip(transformer, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **config))


def _blur(transformer):
    _apply_smoothed_energy_guidance_hook(
        transformer, SmoothedEnergyGuidanceConfig(indices=[1], fqn="transformer_blocks"), 1.0
    )


def _cache(config, transformer):
    transformer.enable_cache(config)


_ON_CPU = {"onload_device": torch.device("cpu"), "offload_device": torch.device("cpu")}
_STEP = {"spatial_attention_block_skip_range": 2, "current_timestep_callback": lambda: 500}

# Each function puts a hook on a transformer as a user does.
HOOKS = {
    "group offload, by leaves": partial(apply_group_offloading, **_ON_CPU, offload_type="leaf_level"),
    "group offload, by blocks": partial(
        apply_group_offloading, **_ON_CPU, offload_type="block_level", num_blocks_per_group=1
    ),
    "layerwise casting": partial(apply_layerwise_casting, storage_dtype=torch.bfloat16, compute_dtype=torch.float32),
    "layer skip, whole blocks": _skip,
    "layer skip, attention": partial(_skip, skip_ff=False),
    "layer skip, feed-forward": partial(_skip, skip_attention=False),
    "layer skip, attention scores (perturbed attention)": partial(
        _skip, skip_attention=False, skip_attention_scores=True, skip_ff=False
    ),
    "layer skip, dropout 0.5 (auto guidance)": partial(_skip, dropout=0.5),
    "smoothed energy guidance": _blur,
    "Pyramid Attention Broadcast": partial(_cache, PyramidAttentionBroadcastConfig(**_STEP)),
    "FasterCache": partial(_cache, FasterCacheConfig(**_STEP, is_guidance_distilled=True, tensor_format="BFCHW")),
    "First Block Cache of diffusers": partial(_cache, FirstBlockCacheConfig(threshold=0.5)),
    "MagCache": partial(_cache, MagCacheConfig(num_inference_steps=3, mag_ratios=torch.ones(3))),
    "SeaCache": partial(_cache, SeaCacheConfig()),
    "TaylorSeer": partial(_cache, TaylorSeerCacheConfig()),
    "text key and value cache": partial(_cache, TextKVCacheConfig()),
}


# These hooks change weights only, or skip each token independently.
EXACT = {hook for hook in HOOKS if hook.startswith(("group offload", "layerwise", "layer skip"))} - {
    "layer skip, dropout 0.5 (auto guidance)"
}
# No hook above installs these. They concern GPUs, LoRAs, or diffusers' own parallelism, which is refused when it is
# enabled.
NOT_TRIED = {
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "PeftInputAutocastDisableHook",
    "ContextParallelSplitHook",
    "ContextParallelGatherHook",
    # These belong to caches whose other hooks are tried: the first to a model without a plan, the second to models with
    # a norm after their blocks.
    "TextKVCacheBlockHook",
    "SeaCachePostNormHook",
}


SOME = (
    "layer skip, whole blocks",
    "layer skip, dropout 0.5 (auto guidance)",
    "smoothed energy guidance",
    "FasterCache",
)


def pipeline_of(hook):
    """Return the name of the pipeline for ``hook``. diffusers fails to skip layers of Qwen-Image, also on one
    device.
    """
    return "pixart" if hook.startswith("layer skip") else "qwen-image"


def build(hook):
    """Return the tiny pipeline, with that hook on its transformer."""
    pipe = PIPELINES[pipeline_of(hook)].build()
    HOOKS[hook](pipe.transformer)
    return pipe


def outcomes(hook):
    """Return the error of this rank, or the message that refuses the call, by mesh."""
    name, results = pipeline_of(hook), {}
    expected = None
    for batch, ring, ulysses in ((1, 1, 2), (1, 2, 1), (2, 1, 1)):
        pipe = parallelize_pipe(build(hook), mesh=cpu_mesh(ring, ulysses, batch=batch))
        try:
            out = generate(pipe, name)
        except RuntimeError as error:
            results[batch, ring, ulysses] = str(error)
            continue
        if expected is None:
            expected = generate(build(hook), name)
        results[batch, ring, ulysses] = relative_error(out, expected)
    return results


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", [pytest.param(hook, marks=() if hook in SOME else pytest.mark.long) for hook in HOOKS])
def test_each_hook_is_exact_or_refused_before_the_call(rank_pool, hook):
    for results in rank_pool.run(outcomes, 2, hook):
        if hook in EXACT:
            assert all(isinstance(result, float) and result < 1e-5 for result in results.values()), results
        elif hook == "smoothed energy guidance":
            # On a batch mesh each rank has whole images, so the blur is exact.
            assert results.pop((2, 1, 1)) < 1e-5
            assert all("blurs" in text for text in results.values())
        else:
            assert all("pipe.transformer has" in str(result) for result in results.values()), results


def test_every_hook_of_diffusers_is_tried():
    modules = [
        importlib.import_module(f"diffusers.hooks.{module.name}")
        for module in pkgutil.iter_modules(diffusers.hooks.__path__)
        if module.name != "tensor_parallel_neuron"
    ]
    classes = {
        cls.__name__
        for module in modules
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, ModelHook) and cls is not ModelHook
    }
    tried = {type(hook).__name__ for name in HOOKS for _, hook in hooks_of(build(name).transformer)}
    assert classes - NOT_TRIED == tried


class Doubles(ModelHook):
    def post_forward(self, module, output):
        return output * 2


def with_hooks_of_others():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer.x_embedder)
    registry.register_hook(Doubles(), "mine")
    image = pipe(**flux_call()).images
    # A later version of diffusers could bring such a hook.
    Doubles.__module__ = "diffusers.hooks.of_tomorrow"
    try:
        with pytest.raises(RuntimeError, match="Doubles at 'x_embedder'"):
            pipe(**flux_call())
    finally:
        Doubles.__module__ = __name__
    return image


def test_user_hook_stays_and_unknown_diffusers_hook_raises(rank_pool):
    pipe = flux_pipe()
    plain = pipe(**flux_call()).images
    HookRegistry.check_if_exists_or_initialize(pipe.transformer.x_embedder).register_hook(Doubles(), "mine")
    expected = pipe(**flux_call()).images
    assert relative_error(expected, plain) > 1e-3
    for image in rank_pool.run(with_hooks_of_others, 2):
        assert relative_error(image, expected) < 1e-5


def test_guider_is_refused_if_its_hook_would_be():
    with pytest.raises(RuntimeError, match=r"pipe\.guider is a AutoGuidance: .*drops"):
        check_guider(SimpleNamespace(guider=AutoGuidance(auto_guidance_layers=[1], dropout=0.5)), 2)
    with pytest.raises(RuntimeError, match=r"pipe\.guider is a SmoothedEnergyGuidance: .*blurs"):
        check_guider(SimpleNamespace(guider=SmoothedEnergyGuidance(seg_guidance_layers=[1])), 2)
    # Ranks that share guidance only have all tokens.
    check_guider(SimpleNamespace(guider=SmoothedEnergyGuidance(seg_guidance_layers=[1])), 1)
    check_guider(SimpleNamespace(guider=ClassifierFreeGuidance()), 2)
