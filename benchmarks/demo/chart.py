"""The chart of README.md, from the JSON of other benchmarks:  python -m benchmarks.demo.chart

Left the speed-up of one step on two ranks over one (`benchmarks.pipelines.beside_diffusers`), right how far images with
a cache are from those without it (`benchmarks.cache.quality`). Measures nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.harness import ROOT, parser_of, read_results
from benchmarks.pipelines.beside_diffusers import ratios

OURS, OTHERS = "#1f5fbf", "#9aa3ad"
CACHES = {
    "para_core first_block, forecast_order=1": ("para_core, default", OURS),
    "para_core first_block": ("without forecasts, as in diffusers", OTHERS),
}
STEPS = 28


def plot_speed_ups(axes: Axes, row: dict[str, Any]) -> None:
    """Draw a bar for each way of running FLUX on two ranks; whiskers show all rounds."""
    ways = [way for way in row["seconds"] if way != "1 rank"]
    for position, way in enumerate(reversed(ways)):
        each = ratios(row["seconds"], "1 rank", way)
        middle = statistics.median(each)
        axes.barh(position, middle, 0.6, color=OURS if way.startswith("para_core") else OTHERS)
        axes.plot([min(each), max(each)], [position, position], color="black", linewidth=1)
        axes.text(0.04, position, f"{way}: {middle:.2f} ×", va="center", color="white", fontsize=9)
    axes.axvline(2, color="black", linewidth=0.8, linestyle=":")
    axes.set_title("speed-up of a step on 2 ranks (FLUX, two CPU cores)", fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(0, 2.15)


def plot_cache_errors(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw the PSNR of cached images against the number of computed steps, one line for each kind of cache."""
    for cache, (label, colour) in CACHES.items():
        points = sorted(
            (row["computed"], row["psnr"]) for row in rows if row["cache"] == cache and row["steps"] == STEPS
        )
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
    axes.set_title(f"cache: PSNR (dB) against computed steps of {STEPS}", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def main() -> None:
    """Draw both parts, and save them."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/chart.png")
    output = parser.parse_args().output
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.4))
    large = read_results("beside_diffusers")["large"]
    plot_speed_ups(left, next(row for row in large if row["model"] == "flux"))
    plot_cache_errors(right, read_results("cache_quality")["quality"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main()
