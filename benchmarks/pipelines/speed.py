"""One FLUX transformer step on two ranks against one, and against diffusers' own context parallelism.

    python -m benchmarks.pipelines.speed

All in one run, in turns, on the same weights and input: 1 rank × 1 thread (rank 0 alone, the unmodified model), then 2
ranks × 1 thread each way. Quoted is the median of the ratios of each round. Prints a table and writes
benchmarks/results/parallel_speed.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from torch import Tensor

from benchmarks.environment import write_results
from benchmarks.launch import launch
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_transformer

TEXT_TOKENS, IMAGE_TOKENS = 256, 3840
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (16, 24, 24),
}
Step = Callable[[], Tensor]


def build_transformer() -> FluxTransformer2DModel:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(**SETTINGS).eval()


def build_input() -> dict[str, Any]:
    """One step's input, batch 1."""
    generator = torch.Generator().manual_seed(1)
    side = torch.arange(IMAGE_TOKENS)
    return {
        "hidden_states": torch.randn(1, IMAGE_TOKENS, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 256, generator=generator),
        "pooled_projections": torch.randn(1, 64, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros_like(side), side // 60, side % 60], dim=1).float(),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "return_dict": False,
    }


def with_para_core(transformer: FluxTransformer2DModel, *, ring: int) -> FluxTransformer2DModel:
    """The transformer on two ranks, by para_core."""
    return parallelize_transformer(transformer, mesh=init_context_parallel_mesh("cpu", max_ring_dim_size=ring))


def with_diffusers(transformer: FluxTransformer2DModel, **degrees: int) -> FluxTransformer2DModel:
    """The transformer on two ranks, by diffusers' own context parallelism."""
    # It asks how many accelerators there are; on a CPU that is none.
    torch.accelerator.device_count = dist.get_world_size
    transformer.enable_parallelism(config=ContextParallelConfig(**degrees))
    return transformer


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of each way in each round, and its largest difference from the unmodified model; for one rank process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = build_input()
    reference = build_transformer()
    ways: dict[str, FluxTransformer2DModel] = {
        "para_core, ulysses 2": with_para_core(copy.deepcopy(reference), ring=1),
        "para_core, ring 2": with_para_core(copy.deepcopy(reference), ring=2),
        "diffusers, ulysses 2": with_diffusers(copy.deepcopy(reference), ulysses_degree=2),
        "diffusers, ring 2": with_diffusers(copy.deepcopy(reference), ring_degree=2),
    }
    with torch.inference_mode():
        expected = reference(**given)[0]
        errors = {}
        for name in list(ways):
            try:
                errors[name] = ((ways[name](**given)[0] - expected).norm() / expected.norm()).item()
            except (RuntimeError, ValueError, NotImplementedError) as error:
                errors[name] = f"refused: {error}"
                del ways[name]
        seconds: dict[str, list[float]] = {"1 rank": [], **{name: [] for name in ways}}
        for _ in range(rounds):
            dist.barrier()
            if dist.get_rank() == 0:
                seconds["1 rank"].append(timed(lambda: reference(**given)))
            for name, transformer in ways.items():
                dist.barrier()
                seconds[name].append(timed(lambda transformer=transformer: transformer(**given)))
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "relative error": errors}


def timed(step: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per way: median seconds, median of the rounds' ratios to one rank, error."""
    alone = measured["seconds"]["1 rank"]
    rows = []
    for name, seconds in measured["seconds"].items():
        ratios = [one / many for one, many in zip(alone, seconds, strict=True)]
        rows.append(
            {
                "way": name,
                "seconds per step": statistics.median(seconds),
                "speed-up": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "relative error": measured["relative error"].get(name, 0.0),
            }
        )
    refused = {name: error for name, error in measured["relative error"].items() if isinstance(error, str)}
    return rows + [{"way": name, "refused": error} for name, error in refused.items()]


def main() -> None:
    """Start the two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank_process:
        launch("benchmarks.pipelines.speed", 2, "--rank-process", "--rounds", str(options.rounds))
        return
    measured = measure(options.rounds)
    if not measured["seconds"]["1 rank"]:
        return
    rows = table(measured)
    for row in rows:
        if "refused" in row:
            print(f"{row['way']:<24}{row['refused']}")
            continue
        spread = f"{row['speed-up']:.2f} × ({row['lowest']:.2f} – {row['highest']:.2f})"
        print(f"{row['way']:<24}{row['seconds per step']:>8.3f} s{spread:>26}   error {row['relative error']:.1e}")
    settings = {**SETTINGS, "text tokens": TEXT_TOKENS, "image tokens": IMAGE_TOKENS, "rounds": options.rounds}
    print(write_results("parallel_speed", {"settings": settings, "rows": rows, **measured}, "diffusers"))


if __name__ == "__main__":
    main()
