"""The same image from one process and from several, and with fewer blocks:  python -m benchmarks.demo

Generates one caption with the tiny FLUX on 1 rank (the unmodified pipeline), on 2 (Ulysses; ring) and on 4 (2 × 2),
each rank with one thread. Prints how the images differ and what each rank sends, and saves the four images next to each
other. Then generates again on 1 rank with First Block Cache, and prints the decision of each step and the difference
from the image without the cache.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cache.images import PROMPT, SEED
from benchmarks.cache.judged import psnr, ssim
from benchmarks.cache.ways import SIDE, TEXT_TOKENS, load
from benchmarks.harness import TrafficCounter, measure_on_ranks, parser_of
from para_core import init_context_parallel_mesh, unified_attention
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe

STEPS = 20
# This is for the tiny FLUX, because it depends on the model which steps a threshold skips.
THRESHOLD = 0.2
# Each run has ring and Ulysses ranks.
RUNS = {
    "1 rank, unmodified": (1, 1),
    "2 ranks, Ulysses": (1, 2),
    "2 ranks, ring": (2, 1),
    "4 ranks, ring 2 × Ulysses 2": (2, 2),
}


def generate(name: str, ring: int, ulysses: int, threshold: float | None = None) -> dict[str, Any]:
    """Generate on one rank of a run, with a cache if there is a ``threshold``. Return latents, image and figures."""
    pipe, figures, rank = load(), {"collectives": 0, "bytes": 0}, 0
    if ring * ulysses > 1:
        rank = dist.get_rank()
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
        parallelize_pipe(pipe, mesh=mesh)
        figures = traffic_of_one_attention_call(pipe, mesh)
    if threshold is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
    pipe.set_progress_bar_config(disable=rank != 0, desc=name)
    result: dict[str, Any] = dict(figures)

    def after_step(pipe: FluxPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        times.append(time.perf_counter())
        result["latents"] = tensors["latents"]
        return tensors

    # The first image is not timed, because the cache imports some modules at the first computed step after a skipped
    # one.
    for _ in range(1 if threshold is None else 2):
        times: list[float] = []
        result["image"] = pipe(
            PROMPT,
            height=SIDE,
            width=SIDE,
            max_sequence_length=TEXT_TOKENS,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=after_step,
            output_type="np",
        ).images
    # The first step is left out, because it also allocates memory that later steps reuse.
    result["seconds"] = (times[-1] - times[0]) / (STEPS - 1)
    return result if threshold is None else {**result, "report": cache_report(pipe)}


def traffic_of_one_attention_call(pipe: FluxPipeline, mesh: DeviceMesh) -> dict[str, int]:
    """Return the collectives of this rank in one attention call of the pipeline's size, and the bytes that it sends."""
    config = pipe.transformer.config
    tokens = TEXT_TOKENS + (SIDE // (2 * pipe.vae_scale_factor)) ** 2
    query = torch.zeros(1, config.num_attention_heads, tokens // mesh.size(), config.attention_head_dim)
    with TrafficCounter() as counter:
        unified_attention(query, query, query, mesh=mesh)
    return {"collectives": counter.collectives, "bytes": counter.bytes}


def print_table(runs: dict[str, dict[str, Any]]) -> None:
    """Print a row for each run, with its differences from the first."""
    reference = next(iter(runs.values()))
    print(f"\n{'mesh':<28}{'s/step':>8}{'latents, max |Δ|':>18}{'8-bit values':>22}{'collectives':>13}{'bytes':>10}")
    for name, run in runs.items():
        pixels, expected = ((x["image"] * 255).round().astype(int) for x in (run, reference))
        difference = np.abs(pixels - expected)
        values = f"{(difference > 0).sum()} of {difference.size}, ≤ {difference.max()}"
        latents = (run["latents"] - reference["latents"]).abs().max().item()
        print(f"{name:<28}{run['seconds']:>8.3f}{latents:>18.1e}{values:>22}{run['collectives']:>13}{run['bytes']:>10}")
    print("collectives and bytes: of one rank, per attention call\n")


def save_images(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Save the images of all runs side by side; below each, how far it is from the first."""
    reference = next(iter(runs.values()))
    figure, axes = plt.subplots(1, len(runs), figsize=(2.4 * len(runs), 3))
    for (name, run), frame in zip(runs.items(), axes, strict=True):
        frame.imshow(run["image"][0], interpolation="nearest")
        frame.set_title(name, fontsize=9)
        difference = np.abs(run["image"] - reference["image"]).max()
        words = "the reference" if run is reference else f"max difference {difference:.0e}"
        if run is not reference and difference == 0:
            words = "the same bits"
        frame.set_xlabel(words, fontsize=9)
        frame.set_xticks([])
        frame.set_yticks([])
    figure.suptitle(f"“{PROMPT}”", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Generate all images, compare and save them."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.png"))
    output = parser.parse_args().output
    runs = {
        name: measure_on_ranks(generate, ring * ulysses, name, ring, ulysses) for name, (ring, ulysses) in RUNS.items()
    }
    print_table(runs)
    save_images(runs, output)
    cached, without = measure_on_ranks(generate, 1, "1 rank, cached", 1, 1, THRESHOLD), next(iter(runs.values()))
    images = cached["image"][0], without["image"][0]
    print(cached["report"])
    print(
        f"a step without the cache {without['seconds']:.3f} s, with it {cached['seconds']:.3f} s; "
        f"PSNR {psnr(*images):.1f} dB, SSIM {ssim(*images):.4f}\n\nthe images: {output}"
    )


if __name__ == "__main__":
    main()
