"""The same image from one process and from several, and with fewer blocks:  python -m benchmarks.demo

Generates one caption with the tiny FLUX on 1 rank (the unmodified pipeline), on 2 (Ulysses; ring) and on 4 (2 × 2),
each rank with one thread; prints how they differ and what travelled, and saves the four images side by side. Then once
more on 1 rank without and with First Block Cache: prints what each step did, and saves both images, their difference,
and the plot.
"""

from __future__ import annotations

import argparse
import tempfile
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

from benchmarks.harness import TrafficCounter, launch, parser_of, write_results
from para_core import init_context_parallel_mesh, unified_attention
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe
from para_core.adapters.cache.calibration.image_metrics import as_images, load_metric
from zoo.flux import PIPELINE

PROMPT = "a large red circle on the left and a small blue triangle in the bottom right on a striped background"
STEPS, SIZE, TEXT_TOKENS = 20, 128, 64
SEED = 5  # of eight that were looked at, the roundest circle; the checker takes all eight
AMPLIFIED = 200_000
# Of the tiny FLUX; what a threshold skips depends on the model.
THRESHOLD = 0.2
AMPLIFIED_CACHED = 10


@dataclass(frozen=True)
class Mesh:
    """One run: how many ranks, and how they share the work."""

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


def generate(mesh: Mesh, output: Path) -> None:
    """Generate on one rank of a run. Rank 0 writes latents, image and figures to ``output``."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    figures: dict[str, Any] = {"collectives": 0, "bytes": 0}
    rank = 0
    if mesh.ranks > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        device_mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=mesh.ring, max_ulysses_dim_size=mesh.ulysses)
        parallelize_pipe(pipe, mesh=device_mesh)
        figures = traffic_of_one_attention_call(pipe, device_mesh)
    pipe.set_progress_bar_config(disable=rank != 0, desc=mesh.name)
    times: list[float] = []

    def after_step(pipe: FluxPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        times.append(time.perf_counter())
        figures["latents"] = tensors["latents"]
        return tensors

    figures["image"] = pipe(
        PROMPT,
        height=SIZE,
        width=SIZE,
        max_sequence_length=TEXT_TOKENS,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(SEED),
        callback_on_step_end=after_step,
        output_type="np",
    ).images[0]
    # The first step is left out: it also pays for memory that is allocated once.
    figures["seconds"] = (times[-1] - times[0]) / (STEPS - 1)
    if rank == 0:
        torch.save(figures, output)
    if mesh.ranks > 1:
        dist.destroy_process_group()


def generate_cached(output: Path) -> None:
    """Generate without and with the cache, and write images, report and seconds to ``output``."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)

    def image(steps: int) -> np.ndarray:
        generated: np.ndarray = pipe(
            PROMPT,
            height=SIZE,
            width=SIZE,
            max_sequence_length=TEXT_TOKENS,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(SEED),
            output_type="np",
        ).images
        return generated

    # Memory that is allocated once is not measured.
    pipe.set_progress_bar_config(disable=True)
    image(2)
    figures: dict[str, Any] = {}
    for name in ("without", "with"):
        if name == "with":
            apply_cache_on_pipe(pipe, residual_diff_threshold=THRESHOLD)
        pipe.set_progress_bar_config(disable=False, desc=f"1 rank, {name} the cache")
        start = time.perf_counter()
        figures[name] = image(STEPS)
        figures[f"seconds {name}"] = time.perf_counter() - start
    torch.save({**figures, "report": cache_report(pipe)}, output)


def traffic_of_one_attention_call(pipe: FluxPipeline, mesh: DeviceMesh) -> dict[str, Any]:
    """Collectives of this rank in one attention call of the pipeline's size, and the bytes that it sends."""
    config = pipe.transformer.config
    pixels_per_token = 2 * pipe.vae_scale_factor
    tokens = TEXT_TOKENS + (SIZE // pixels_per_token) ** 2
    query = torch.zeros(1, config.num_attention_heads, tokens // mesh.size(), config.attention_head_dim)
    with TrafficCounter() as counter:
        unified_attention(query, query, query, mesh=mesh)
    return {"collectives": counter.collectives, "bytes": counter.bytes}


def run(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Start the processes of one run; returns what rank 0 wrote."""
    output = folder / f"{mesh.ring}x{mesh.ulysses}.pt"
    launch(
        "benchmarks.demo",
        mesh.ranks,
        *("--ring", str(mesh.ring), "--ulysses", str(mesh.ulysses), "--rank-output", str(output)),
    )
    figures: dict[str, Any] = torch.load(output, weights_only=False)
    return figures


def compare(runs: dict[Mesh, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per run, against the first."""
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
    """``[H, W, 3]`` in 0 … 1 as uint8."""
    return (image * 255).round().astype(np.uint8)


def save_figure(runs: dict[Mesh, dict[str, Any]], path: Path) -> None:
    """The images above, their differences from the first below."""
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


def save_cached(figures: dict[str, Any], path: Path) -> None:
    """Without, with, their difference; the report's plot goes beside it."""
    report, (without, cached) = figures["report"], (figures[name][0] for name in ("without", "with"))
    shown = {
        "1 rank, without the cache": without,
        f"threshold {THRESHOLD:g}: {report.computed} of {len(report.rows)} computed": cached,
        f"difference × {AMPLIFIED_CACHED}": np.clip(np.abs(cached - without) * AMPLIFIED_CACHED, 0, 1),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.4))
    for place, (title, image) in zip(axes, shown.items(), strict=True):
        place.imshow(image)
        place.set_title(title, fontsize=10)
        place.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    report.plot(steps_of(path))


def steps_of(path: Path) -> Path:
    """Return the path of the plot of the report."""
    return path.with_name(f"{path.stem}_steps{path.suffix}")


def compare_cached(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of the cache."""
    images = [[as_images(figures[name])] for name in ("with", "without")]
    report = figures["report"]
    return {
        "threshold": THRESHOLD,
        "computed steps": report.computed,
        "steps": len(report.rows),
        "seconds without": figures["seconds without"],
        "seconds with": figures["seconds with"],
        "psnr": load_metric("psnr")(*images),
        "ssim": load_metric("ssim")(*images),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows, as text."""
    print(f"\n{'mesh':<28}{'s/step':>8}{'latents, max |Δ|':>18}{'8-bit values':>22}{'collectives':>13}{'bytes':>10}")
    for row in rows:
        values = f"{row['8-bit values that differ']} of {row['of']}, ≤ {row['by at most']}"
        print(
            f"{row['mesh']:<28}{row['seconds per step']:>8.3f}{row['largest difference in latents']:>18.1e}{values:>22}"
            f"{row['collectives per attention call']:>13}{row['bytes sent per attention call']:>10}"
        )
    print("collectives and bytes: of one rank, per attention call\n")


def main() -> None:
    """Run all, or be one process of a run."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.png"))
    parser.add_argument("--record", action="store_true", help="also write benchmarks/results/demo.json")
    parser.add_argument("--ring", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--ulysses", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:
        generate_cached(options.rank_output)
        return
    if options.rank_output is not None:
        generate(Mesh(options.ring, options.ulysses), options.rank_output)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = {mesh: run(mesh, Path(folder)) for mesh in RUNS}
        cached_output = Path(folder) / "cached.pt"
        launch("benchmarks.demo", 1, "--cache", "--rank-output", str(cached_output))
        figures: dict[str, Any] = torch.load(cached_output, weights_only=False)
    rows = compare(runs)
    print_table(rows)
    save_figure(runs, options.output)
    cached_path = options.output.with_name(f"{options.output.stem}_cache{options.output.suffix}")
    save_cached(figures, cached_path)
    cached = compare_cached(figures)
    print(figures["report"])
    print(
        f"without the cache {cached['seconds without']:.2f} s, with it {cached['seconds with']:.2f} s; PSNR "
        f"{cached['psnr']:.1f} dB, SSIM {cached['ssim']:.4f}\n"
    )
    print(f"the images: {options.output}, {cached_path}, {steps_of(cached_path)}")
    if options.record:
        settings = {"prompt": PROMPT, "steps": STEPS, "size": SIZE, "text tokens": TEXT_TOKENS, "threads per rank": 1}
        print(
            f"the figures: {write_results('demo', {'settings': settings, 'rows': rows, 'cache': cached}, 'diffusers')}"
        )


if __name__ == "__main__":
    main()
