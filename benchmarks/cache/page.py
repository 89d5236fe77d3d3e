"""The generated parts of docs/cache_quality.md, from benchmarks/results/cache_quality.json."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.page_parts import fill

Row = dict[str, Any]
# What all others are compared with, at as many computed steps.
BASELINES = {
    "first_block": "para_core first_block",
    "forecast": "para_core first_block, forecast_order=1",
}


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Of each way the means over all captions, and its PSNR beside para_core's at as many computed steps.

    Args:
        rows: lists with a value for each caption.
    """
    found = []
    for row in sorted(rows, key=lambda x: (x["steps"], x["cache"] != "no cache", -_mean(x["computed"]))):
        summary = {name: row[name] for name in ("cache", "setting", "steps")}
        for name in ("computed", "psnr", "ssim", "right", "as without", "attributes"):
            summary[name] = round(_mean(row[name]), 5)
        summary["least psnr"] = min(row["psnr"])
        for name, cache in BASELINES.items():
            same = [x for x in rows if (x["cache"], x["steps"]) == (cache, row["steps"])]
            summary[f"psnr beside {name}"] = None if row["cache"] in ("no cache", cache) else beside(row, same)
        found.append(summary)
    return found


def beside(row: Row, baseline: Sequence[Row]) -> list[float] | None:
    """Mean difference in PSNR from the baseline at as many computed steps, and its standard error; captions are pairs.

    The baseline between two of its thresholds is their mean, weighed so that it computes as many steps.

    >>> row = {"computed": [4, 6], "psnr": [30.0, 34.0]}
    >>> beside(row, [{"computed": [3, 3], "psnr": [20.0, 20.0]}, {"computed": [7, 7], "psnr": [30.0, 32.0]}])
    [6.5, 1.5]
    """
    wanted = _mean(row["computed"])
    ordered = sorted(baseline, key=lambda x: _mean(x["computed"]))
    for lower, upper in itertools.pairwise(ordered):
        low, high = _mean(lower["computed"]), _mean(upper["computed"])
        # Half a step beyond the curve's ends is still called as many.
        if low - 0.5 <= wanted <= high + 0.5:
            weight = (wanted - low) / (high - low)
            differences = [
                x - (1 - weight) * a - weight * b
                for x, a, b in zip(row["psnr"], lower["psnr"], upper["psnr"], strict=True)
            ]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            return [round(_mean(differences), 2), round(error, 2)]
    return None


def quality(found: Sequence[Row], steps: int) -> list[str]:
    """The table of one number of steps."""
    lines = [
        (
            "| cache | setting | computed steps | PSNR, dB | least | SSIM | all right | verdict as without a cache | "
            "PSNR beside `first_block` | beside its forecast |"
        ),
        "| --- " * 10 + "|",
    ]
    for row in found:
        if row["steps"] != steps:
            continue
        is_reference = row["cache"] == "no cache"
        psnr = (
            ["", "", ""] if is_reference else [f"{row['psnr']:.1f}", f"{row['least psnr']:.1f}", f"{row['ssim']:.5f}"]
        )
        cells = [
            row["cache"],
            row["setting"],
            f"{row['computed']:.1f} of {steps}",
            *psnr,
            f"{row['right']:.1%}",
            "" if is_reference else f"{row['as without']:.1%}",
            *(
                "" if x is None else f"{x[0]:+.1f} ± {x[1]:.1f}"
                for x in (row[f"psnr beside {name}"] for name in BASELINES)
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed(found: dict[str, Any]) -> list[str]:
    """Eager and compiled, each against no cache measured likewise."""
    compiled = {row["name"]: row for row in found.get("compiled", ())}
    lines = [
        "| cache | computed steps of 28 | eager: seconds | eager: speed-up | compiled: seconds | compiled: speed-up | how |",
        "| --- " * 7 + "|",
    ]
    for row in found.get("eager", ()):
        other = compiled.get(row["name"])
        cells = [row["name"], str(row.get("computed", "")), *_times(row), *_times(other), _how(other)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _times(row: Row | None) -> list[str]:
    if row is None or "cpu_seconds" not in row:
        return ["", ""]
    low, high = row["range"]
    return [f"{row['cpu_seconds']:.3f}", f"{row['speed_up']:.2f} × ({low:.2f} – {high:.2f})"]


def _how(row: Row | None) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return "*refused*"
    return "one graph" if row["fullgraph"] else f"**no** `fullgraph`; {row['graphs']} graphs"


def refusals(found: dict[str, Any]) -> list[str]:
    """What was raised, and what cannot be compared at equal computed steps."""
    lines = []
    for row in found.get("compiled", ()):
        for name in ("refused as one graph", "refused"):
            if name in row:
                lines.append(f"- {row['name']}, compiled, {name}: `{row[name].replace('`', chr(39))}`")
    for row in found.get("others", ()):
        if "refused" in row:
            lines.append(f"- {row['name']}: refused: `{row['refused'].replace('`', chr(39))}`")
        else:
            computed, psnr = (_mean(row[name]) for name in ("attention computed", "psnr"))
            lines.append(f"- {row['name']}: attention computed at {computed:g} of 28 steps; PSNR {psnr:.1f} dB")
    return lines


def about(found: dict[str, Any]) -> list[str]:
    """When, where, with which versions."""
    environment = found["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    where = f"{environment['device']}, one thread, Python {environment['python']}"
    return [
        f"{environment['date']}, {where}, {versions}; {found['captions']} held-out captions of one thing, each alone."
    ]


def render(text: str, found: dict[str, Any]) -> str:
    """The page with its generated parts written anew."""
    return fill(
        text,
        {
            "about": about(found),
            "28 steps": quality(found["quality"], 28),
            "50 steps": quality(found["quality"], 50),
            "speed": speed(found),
            "refusals": refusals(found),
        },
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
