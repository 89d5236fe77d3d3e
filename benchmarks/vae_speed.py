"""Seconds of a decode at 512² on one thread, and on two ranks of one thread each.

    python -m benchmarks.vae_speed

AutoencoderKL with a quarter of Stable Diffusion's channels and random weights. Rounds in turns, medians; the ranks' result is compared
with one device's in the same process. Writes benchmarks/results/vae_speed.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from para_core.adapters import parallelize_vae, unparallelize_vae

OPTIONS: dict[str, Any] = {
    "block_out_channels": (32, 64, 128, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
GOAL = 1.7


@torch.no_grad()
def measure(size: int, rounds: int) -> dict[str, Any]:
    """Medians on this rank: alone, while the other one waits, and on both."""
    torch.manual_seed(0)
    vae: Any = AutoencoderKL(**OPTIONS).eval()
    z = torch.randn(1, 4, size // 8, size // 8)
    seconds: dict[str, list[float]] = {"alone": [], "parallel": []}
    expected = found = z  # the first rank's results
    for _ in range(rounds + 1):  # the first one warms up
        dist.barrier()
        if dist.get_rank() == 0:
            start = time.perf_counter()
            expected = vae.decode(z).sample
            seconds["alone"].append(time.perf_counter() - start)
        dist.barrier()
        parallelize_vae(vae, gather="first")
        start = time.perf_counter()
        found = vae.decode(z).sample
        seconds["parallel"].append(time.perf_counter() - start)
        unparallelize_vae(vae)
    medians = {name: statistics.median(times[1:] or [0.0]) for name, times in seconds.items()}
    error = float((found - expected).norm() / expected.norm()) if dist.get_rank() == 0 else 0.0
    return {**medians, "error": error, "rounds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    options = parser.parse_args()
    if options.part is not None:
        torch.set_num_threads(1)
        write_part(options.part, partial(measure, options.size, options.rounds))
        return
    sizes = ("--size", str(options.size), "--rounds", str(options.rounds))
    found = measured_on_ranks("benchmarks.vae_speed", 2, *sizes)
    speedup = found["alone"] / found["parallel"]
    print(f"{options.size}²: {found['alone']:.2f} s alone, {found['parallel']:.2f} s on two ranks: {speedup:.2f}×")
    print(f"goal {GOAL}×; error {found['error']:.1e}")
    print(write_results("vae_speed", {"size": options.size, "speedup": speedup, **found}, "diffusers"))


if __name__ == "__main__":
    main()
