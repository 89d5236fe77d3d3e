"""One FLUX transformer step on two ranks against one, and against diffusers' own context parallelism.

    python -m benchmarks.pipelines.speed

All in one run, in turns, on the same weights and input: 1 rank × 1 thread (rank 0 alone, the unmodified model), then 2
ranks × 1 thread each way. Quoted is the median of the ratios of each round. Prints a table and writes
benchmarks/results/parallel_speed.json.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import nn

from benchmarks.harness import markdown_table, measure_on_ranks, parser_of, read_results, relative_error, write_results
from benchmarks.pipelines.beside_diffusers import timed, with_diffusers, with_para_core

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


def build_transformer() -> FluxTransformer2DModel:
    """Return the transformer with the same weights on every rank."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(**SETTINGS).eval()


def build_input() -> dict[str, Any]:
    """Return one step's input, batch 1."""
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


def measure(rounds: int) -> dict[str, Any]:
    """Return seconds of each way in each round, and its largest difference from the unmodified model; for one rank
    process.
    """
    inputs = build_input()
    reference = build_transformer()
    ways: dict[str, nn.Module] = {
        f"{name}, {kind} 2": apply(copy.deepcopy(reference), ring=ring, uneven=False)
        for name, apply in (("para_core", with_para_core), ("diffusers", with_diffusers))
        for kind, ring in (("ulysses", 1), ("ring", 2))
    }
    with torch.inference_mode():
        expected = reference(**inputs)[0]
        errors = {}
        for name in list(ways):
            try:
                errors[name] = relative_error(ways[name](**inputs)[0], expected)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                errors[name] = f"refused: {error}"
                del ways[name]
        seconds: dict[str, list[float]] = {"1 rank": [], **{name: [] for name in ways}}
        for _ in range(rounds):
            dist.barrier()
            if dist.get_rank() == 0:
                seconds["1 rank"].append(timed(reference, inputs)[0])
            for name, transformer in ways.items():
                dist.barrier()
                seconds[name].append(timed(transformer, inputs)[0])
    dist.barrier()
    return {"seconds": seconds, "relative error": errors}


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per way: median seconds, median of the rounds' ratios to one rank, error."""
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


def parts() -> dict[str, list[str]]:
    """Return the table of README.md."""
    rows = []
    for row in read_results("parallel_speed")["rows"]:
        if "refused" in row:
            rows.append([row["way"], row["refused"], "", ""])
            continue
        error = row["relative error"]
        spread = f" ({row['lowest']:.2f} – {row['highest']:.2f})" if error else ""
        speed_up = f"{row['speed-up']:.2f} ×{spread}"
        rows.append([row["way"], f"{row['seconds per step']:.2f}", speed_up, f"{error:.1e}" if error else ""])
    return {"speed": markdown_table(["", "seconds per step", "speed-up over 1 rank", "relative difference"], rows)}


def main() -> None:
    """Measure on two ranks and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measured = measure_on_ranks(measure, 2, options.rounds)
    rows = rows_of(measured)
    for row in rows:
        print(row)
    settings = {**SETTINGS, "text tokens": TEXT_TOKENS, "image tokens": IMAGE_TOKENS, "rounds": options.rounds}
    print(write_results("parallel_speed", {"settings": settings, "rows": rows, **measured}, "diffusers"))


if __name__ == "__main__":
    main()
