"""The generated parts of README.md, from benchmarks/results:  python -m benchmarks.readme. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS
from benchmarks.page_parts import fill
from benchmarks.peers.page import summary

PAGE = Path(__file__).parents[1] / "README.md"
# Of python -m benchmarks.cache.quality at 28 steps: the same rule and threshold, by each.
CACHES = {
    ("para_core first_block, forecast_order=1", "threshold 0.12"): "para_core, the default",
    ("para_core first_block", "threshold 0.12"): "para_core, without its forecast",
    ("diffusers First Block Cache", "threshold 0.12"): "diffusers",
    ("cache-dit DBCache F1B0, max_warmup_steps=0", "threshold 0.12"): "cache-dit 1.5.3",
    ("cache-dit DBCache F1B0 + TaylorSeer, order 1, max_warmup_steps=4", "threshold 0.12"): (
        "cache-dit 1.5.3, TaylorSeer (4 steps of warm-up)"
    ),
}


def result(name: str) -> dict[str, Any]:
    """What a program of benchmarks/ measured last."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def caches() -> list[str]:
    """One threshold of First Block Cache in each implementation."""
    lines = ["| First Block Cache, threshold 0.12 | computed steps | PSNR, dB |", "| --- | --- | --- |"]
    for row in result("cache_quality")["quality"]:
        name = CACHES.get((row["cache"], row["setting"]))
        if name and row["steps"] == 28:
            lines.append(f"| {name} | {row['computed']:.1f} of 28 | {row['psnr']:.1f} |")
    return lines


def speed() -> list[str]:
    """Two ranks against one."""
    lines = ["| | seconds per step | speed-up over 1 rank | relative difference |", "| --- | --- | --- | --- |"]
    for row in result("parallel_speed")["rows"]:
        if "refused" in row:
            lines.append(f"| {row['way']} | {row['refused']} | | |")
            continue
        spread = f" ({row['lowest']:.2f} – {row['highest']:.2f})" if row["relative error"] else ""
        difference = f"{row['relative error']:.1e}" if row["relative error"] else ""
        lines.append(
            f"| {row['way']} | {row['seconds per step']:.2f} | {row['speed-up']:.2f} ×{spread} | {difference} |"
        )
    return lines


def render(text: str) -> str:
    """README.md with its tables written anew."""
    return fill(text, {"peers": summary(result("peers")), "caches": caches(), "speed": speed()})


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    print(PAGE)
