"""The same image from one process and from several, and with fewer blocks:  python -m benchmarks.demo

Generates one caption with the tiny FLUX on 1 rank (the unmodified pipeline), on 2 (Ulysses; ring) and on 4 (2 × 2),
each rank with one thread; prints how the images differ and what each rank sends, and saves the four images side by
side. Then once more on 1 rank with First Block Cache: prints what each step did, and how far the image is from the one
without.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import transformers
from diffusers import FluxPipeline
from diffusers.utils import logging
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import TrafficCounter, measure_on_ranks, parser_of, write_results
from para_core import init_context_parallel_mesh, unified_attention
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe
from para_core.adapters.cache.calibration.image_metrics import as_images, load_metric
from zoo.flux import PIPELINE

PROMPT = "a large red circle on the left and a small blue triangle in the bottom right on a striped background"
STEPS, SIZE, TEXT_TOKENS = 20, 128, 64
SEED = 5  # of eight that were looked at, the roundest circle; the checker takes all eight
AMPLIFIED = 200_000
# For the tiny FLUX; which steps a threshold skips depends on the model.
THRESHOLD = 0.2


@dataclass(frozen=True)
class Mesh:
    """The mesh of one run."""

    ring: int
    ulysses: int

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def name(self) -> str:
        if self.ranks == 1:
            return "1 rank, unmodified"
        return f"{self.ranks} ranks, ring {self.ring} × ulysses {self.ulysses}"


RUNS = (Mesh(1, 1), Mesh(1, 2), Mesh(2, 1), Mesh(2, 2))


def generate(ring: int, ulysses: int, threshold: float | None = None) -> dict[str, Any]:
    """Generate on one rank of a run, with a cache if ``threshold`` is given. Return latents, image and figures."""
    logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    mesh, figures, rank = Mesh(ring, ulysses), {"collectives": 0, "bytes": 0}, 0
    if mesh.ranks > 1:
        rank = dist.get_rank()
        device_mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
        parallelize_pipe(pipe, mesh=device_mesh)
        figures = traffic_of_one_attention_call(pipe, device_mesh)
    if threshold is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
    pipe.set_progress_bar_config(disable=rank != 0, desc=mesh.name if threshold is None else "1 rank, cached")
    found: dict[str, Any] = dict(figures)

    def after_step(pipe: FluxPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        times.append(time.perf_counter())
        found["latents"] = tensors["latents"]
        return tensors

    # The first image is not timed: the cache imports some modules at the first computed step after a skipped one.
    for _ in range(1 if threshold is None else 2):
        times: list[float] = []
        found["image"] = pipe(
            PROMPT,
            height=SIZE,
            width=SIZE,
            max_sequence_length=TEXT_TOKENS,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=after_step,
            output_type="np",
        ).images[0]
    # The first step is left out: it also allocates memory that later steps reuse.
    found["seconds"] = (times[-1] - times[0]) / (STEPS - 1)
    return found if threshold is None else {**found, "report": cache_report(pipe)}


def traffic_of_one_attention_call(pipe: FluxPipeline, mesh: DeviceMesh) -> dict[str, int]:
    """Return the collectives of this rank in one attention call of the pipeline's size, and the bytes that it sends."""
    config = pipe.transformer.config
    pixels_per_token = 2 * pipe.vae_scale_factor
    tokens = TEXT_TOKENS + (SIZE // pixels_per_token) ** 2
    query = torch.zeros(1, config.num_attention_heads, tokens // mesh.size(), config.attention_head_dim)
    with TrafficCounter() as counter:
        unified_attention(query, query, query, mesh=mesh)
    return {"collectives": counter.collectives, "bytes": counter.bytes}


def compare(runs: dict[Mesh, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per run, with its differences from the first run."""
    reference = next(iter(runs.values()))
    rows = []
    for mesh, figures in runs.items():
        difference = np.abs(to_8_bit(figures["image"]).astype(int) - to_8_bit(reference["image"]).astype(int))
        rows.append(
            {
                "mesh": mesh.name,
                "seconds per step": figures["seconds"],
                "largest difference in latents": (figures["latents"] - reference["latents"]).abs().max().item(),
                "8-bit values that differ": int((difference > 0).sum()),
                "of": int(difference.size),
                "by at most": int(difference.max()),
                "collectives per attention call": figures["collectives"],
                "bytes sent per attention call": figures["bytes"],
            }
        )
    return rows


def to_8_bit(image: np.ndarray) -> np.ndarray:
    """Return ``[H, W, 3]`` in 0 … 1 as uint8."""
    return (image * 255).round().astype(np.uint8)


def save_figure(runs: dict[Mesh, dict[str, Any]], path: Path) -> None:
    """Save the images, and below each its difference from the first."""
    reference = next(iter(runs.values()))["image"]
    figure, axes = plt.subplots(2, len(runs), figsize=(3 * len(runs), 6.6))
    for (mesh, figures), (above, below) in zip(runs.items(), axes.T, strict=True):
        above.imshow(figures["image"])
        above.set_title(mesh.name, fontsize=10)
        below.imshow(np.clip(np.abs(figures["image"] - reference) * AMPLIFIED, 0, 1))
        below.set_title("the reference" if mesh.ranks == 1 else f"difference × {AMPLIFIED:,}", fontsize=10)
        above.axis("off")
        below.axis("off")
    figure.suptitle(PROMPT, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows."""
    print(f"\n{'mesh':<28}{'s/step':>8}{'latents, max |Δ|':>18}{'8-bit values':>22}{'collectives':>13}{'bytes':>10}")
    for row in rows:
        values = f"{row['8-bit values that differ']} of {row['of']}, ≤ {row['by at most']}"
        print(
            f"{row['mesh']:<28}{row['seconds per step']:>8.3f}{row['largest difference in latents']:>18.1e}{values:>22}"
            f"{row['collectives per attention call']:>13}{row['bytes sent per attention call']:>10}"
        )
    print("collectives and bytes: of one rank, per attention call\n")


def main() -> None:
    """Generate all images, compare and save them."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.png"))
    parser.add_argument("--record", action="store_true", help="also write benchmarks/results/demo.json")
    options = parser.parse_args()
    runs = {mesh: measure_on_ranks(generate, mesh.ranks, mesh.ring, mesh.ulysses) for mesh in RUNS}
    rows = compare(runs)
    print_table(rows)
    save_figure(runs, options.output)
    cached, without = measure_on_ranks(generate, 1, 1, 1, THRESHOLD), runs[RUNS[0]]
    images = [[as_images(figures["image"][None])] for figures in (cached, without)]
    cache = {
        "threshold": THRESHOLD,
        "computed steps": cached["report"].computed,
        "steps": STEPS,
        "seconds per step without": without["seconds"],
        "seconds per step with": cached["seconds"],
        "psnr": load_metric("psnr")(*images),
        "ssim": load_metric("ssim")(*images),
    }
    print(cached["report"])
    print(
        f"a step without the cache {without['seconds']:.3f} s, with it {cached['seconds']:.3f} s; PSNR "
        f"{cache['psnr']:.1f} dB, SSIM {cache['ssim']:.4f}\n"
    )
    print(f"the images: {options.output}")
    if options.record:
        settings = {"prompt": PROMPT, "steps": STEPS, "size": SIZE, "text tokens": TEXT_TOKENS, "threads per rank": 1}
        results = {"settings": settings, "rows": rows, "cache": cache}
        print(f"the figures: {write_results('demo', results, 'diffusers')}")


if __name__ == "__main__":
    main()
