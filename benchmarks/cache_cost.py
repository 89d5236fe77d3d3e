"""What a skipped step costs, and what a cache holds:  python -m benchmarks.cache_cost

A FLUX transformer with random weights. A skipped step against the same model with its first block alone: its embedders,
block 0 and final layers. A computed step against the model without a cache. Eager and compiled, turn by turn in one run;
writes benchmarks/results/cache_cost.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from benchmarks.environment import write_results
from benchmarks.random_weights import fill
from para_core import apply_cache
from para_core.adapters.models.flux import FLUX
from para_core.cache.apply import held_bytes

CONFIG = {
    "in_channels": 64,
    "num_layers": 4,
    "num_single_layers": 6,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
}
IMAGE, TEXT = 1024, 64
WIDTH = 64 * 8


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(1, IMAGE, 64),
        "encoder_hidden_states": torch.randn(1, TEXT, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(IMAGE, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def model(**config: Any) -> FluxTransformer2DModel:
    return fill(FluxTransformer2DModel(**{**CONFIG, **config}), seed=1).eval()


def ways(compiled: bool) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: each call once."""
    given = inputs()
    plain, first_block = model(), model(num_layers=1, num_single_layers=0)
    computing, skipping = model(), model()
    for cached, threshold in ((computing, 0.0), (skipping, 1e9)):
        apply_cache(cached, FLUX.blocks, residual_diff_threshold=threshold)
    named: dict[str, Any] = {
        "without": plain,
        "block 0 alone": first_block,
        "computed": computing,
        "skipped": skipping,
    }
    if compiled:
        for called in named.values():
            called.compile(fullgraph=True)
    for name, called in named.items():
        for _ in range(3):  # the first fills the state, the second compiles with it
            called(**given)
        if name in ("computed", "skipped"):
            expected = IMAGE * WIDTH * 4 + (IMAGE + TEXT) * WIDTH * 4
            if held_bytes(called) != expected:
                raise RuntimeError(f"the cache holds {held_bytes(called)} bytes; the formula says {expected}.")
    return {name: (lambda called=called: called(**given)) for name, called in named.items()}


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Median seconds of each, and the ratios of one round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)

    def ratio(name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

    return {
        "milliseconds": {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()},
        "skipped / block 0 alone": round(ratio("skipped", "block 0 alone"), 3),
        "computed / without": round(ratio("computed", "without"), 3),
        "without / skipped": round(ratio("without", "skipped"), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"tokens": IMAGE + TEXT, "width": WIDTH, "blocks": 10, "bytes held": None}
    results["bytes held"] = (2 * IMAGE + TEXT) * WIDTH * 4
    with torch.no_grad():
        for compiled in (False, True):
            name = "compiled" if compiled else "eager"
            results[name] = measure(ways(compiled), args.rounds)
            print(name, results[name])
    print("written to", write_results("cache_cost", results, "diffusers"))


if __name__ == "__main__":
    main()
