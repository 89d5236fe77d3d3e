"""diffusers' own hooks on a tiny Qwen-Image or PixArt, in three steps with guidance, compared with the same hook on one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    LayerSkipConfig,
    MagCacheConfig,
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import relative_error
from benchmarks.pipelines.latents import generate
from para_core.adapters import parallelize_pipe
from zoo.tiny.pipelines import PIPELINES

MESHES = {"2 Ulysses": (1, 1, 2), "2 ring": (1, 2, 1), "2 batch": (2, 1, 1)}


def _skip(transformer: nn.Module, **config: Any) -> None:
    apply_layer_skip(transformer, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **config))


def _blur(transformer: nn.Module) -> None:
    _apply_smoothed_energy_guidance_hook(
        transformer, SmoothedEnergyGuidanceConfig(indices=[1], fqn="transformer_blocks"), 1.0
    )


def _cache(config: Any, transformer: Any) -> None:
    transformer.enable_cache(config)


_ON_CPU = {"onload_device": torch.device("cpu"), "offload_device": torch.device("cpu")}
_STEP = {"spatial_attention_block_skip_range": 2, "current_timestep_callback": lambda: 500}

# Each function puts a hook on a transformer as a user does.
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
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


def pipeline_of(hook: str) -> str:
    """Return the name of the pipeline for ``hook``. diffusers fails to skip layers of Qwen-Image, also on one
    device.
    """
    return "pixart" if hook.startswith("layer skip") else "qwen-image"


def build(hook: str) -> Any:
    """Return the tiny pipeline, with that hook on its transformer."""
    pipe = PIPELINES[pipeline_of(hook)].build()
    HOOKS[hook](pipe.transformer)
    return pipe


def outcome(hook: str, mesh: DeviceMesh) -> float | str:
    """Return the error of this rank, or the message that refuses the call."""
    name = pipeline_of(hook)
    pipe = parallelize_pipe(build(hook), mesh=mesh)
    try:
        out = generate(pipe, name)
    except RuntimeError as error:
        return str(error)
    return relative_error(out, generate(build(hook), name))
