"""What diffusers' own hooks do to a pipeline that runs on several ranks: exact, or refused before the call.

    python -m benchmarks.pipelines.hooks

Every hook of the installed diffusers, on a tiny Qwen-Image (or PixArt) with random weights in float32, three steps with guidance: the
relative error of the latents against the same pipeline with the same hook on one device, the worst rank's; or what the error before the call
says. Writes docs/hooks.md and benchmarks/results/hooks.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.pipelines.generation import generate, relative_error, worst
from para_core.adapters import parallelize_pipe
from zoo.tiny.pipelines.registry import PIPELINES

MESHES = {"2 Ulysses": (1, 1, 2), "2 ring": (1, 2, 1), "2 batch": (2, 1, 1)}
PAGE = Path(__file__).parents[2] / "docs/hooks.md"


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

# How a user puts it on a transformer.
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
    """The name of the pipeline that ``hook`` is tried on: of Qwen-Image diffusers skips layers with an error, alone too."""
    return "pixart" if hook.startswith("layer skip") else "qwen-image"


def build(hook: str) -> Any:
    """The tiny pipeline, with that hook on its transformer."""
    pipe = PIPELINES[pipeline_of(hook)].build()
    HOOKS[hook](pipe.transformer)
    return pipe


def outcome(hook: str, mesh: DeviceMesh) -> float | str:
    """The error of this rank; or what refuses the call."""
    name = pipeline_of(hook)
    pipe = parallelize_pipe(build(hook), mesh=mesh)
    try:
        out = generate(pipe, name)
    except RuntimeError as error:
        return str(error)
    return relative_error(out, generate(build(hook), name))


def of_all_ranks(found: float | str) -> float | str:
    """The largest error, or the text; all ranks have the same kind."""
    return worst(found) if isinstance(found, float) else found


def try_on_these_ranks(path: Path) -> None:
    """Every hook on every mesh; rank 0 writes them down."""
    dist.init_process_group("gloo")
    meshes = {
        label: init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses"))
        for label, shape in MESHES.items()
    }
    rows = {hook: {label: of_all_ranks(outcome(hook, mesh)) for label, mesh in meshes.items()} for hook in HOOKS}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.destroy_process_group()


def write_page(rows: dict[str, dict[str, float | str]]) -> None:
    """docs/hooks.md."""
    reasons: dict[str, str] = {}
    lines = [
        "# diffusers' own hooks on several ranks",
        "",
        (
            "Written by `python -m benchmarks.pipelines.hooks` (numbers in `benchmarks/results/hooks.json`): a tiny Qwen-Image (PixArt "
            "where layers are skipped) with random weights in float32, three steps with guidance. A number is the relative error of the latents against the same pipeline with the "
            "same hook on one device. *Refused* is an error on every rank before the call; what it says stands below."
        ),
        "",
        "| hook | " + " | ".join(MESHES) + " |",
        "| --- |" + " --- |" * len(MESHES),
    ]
    for hook, row in rows.items():
        cells = [f"{cell:.0e}" if isinstance(cell, float) else "*refused*" for cell in row.values()]
        lines.append(f"| {hook} | " + " | ".join(cells) + " |")
        for cell in row.values():
            if isinstance(cell, str):
                reasons[hook] = cell.removeprefix("sequence rank 0: ")
    lines += ["", "## What the errors say", "", *[f"- {hook}: {reason}" for hook, reason in reasons.items()]]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Start two ranks, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    args = parser.parse_args()
    if args.part is not None:
        try_on_these_ranks(args.part)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "2.json"
        launch("benchmarks.pipelines.hooks", 2, "--part", str(path))
        rows = json.loads(path.read_text())
    write_results("hooks", {"hooks": rows}, "diffusers")
    write_page(rows)
    print(f"{len(rows)} hooks on {len(MESHES)} meshes. {PAGE}")


if __name__ == "__main__":
    main()
