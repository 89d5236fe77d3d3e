"""Caches compared: computed steps, likeness to the images without a cache, and speed.

    python -m benchmarks.cache.quality  # may be stopped at any time, and continues there
    python -m benchmarks.cache.quality --parts eager compiled --rounds 25  # the seconds only, on a quiet machine

Generates held-out captions with the tiny trained FLUX, each alone, because a cache decides for a call as a whole.
Writes benchmarks/results/cache_quality.json (docs/measured/cache_quality.md). cache-dit is measured if it is installed:
``pip install --no-deps cache-dit==1.5.3``, into an environment that is not para_core's.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cache.judged import images_of, judge, reference
from benchmarks.cache.speed import measure
from benchmarks.cache.ways import NO_CACHE, QUALITY
from benchmarks.harness import ROOT, markdown_table, parser_of, read_results, write_results

PROMPTS = 64
PARTS = ("quality", "eager", "compiled")
STEPS = 28


class Rows:
    """Measured rows by key. The file is written whenever a row is added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = self._read()

    def _read(self) -> dict[str, Any]:
        rows: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return rows

    def add(self, key: str, row: Any) -> None:
        # Another process may measure another part.
        self.rows = {**self._read(), key: row}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.rows))
        partial.rename(self._path)


def sweep(rows: Rows, count: int, folder: Path, only: str = "") -> None:
    """Measure each way whose row is missing."""
    expected, cost = reference(STEPS, count, folder)
    if _key(count, NO_CACHE.name) not in rows.rows:
        row = {"cache": NO_CACHE.name, "setting": "", "steps": STEPS}
        rows.add(_key(count, NO_CACHE.name), {**row, **cost, **judge(expected, expected)})
    for way in QUALITY:
        key = _key(count, way.name)
        if key in rows.rows or only not in way.name:
            continue
        if not way.installed:
            print(f"{key}: {way.package} is not installed")
            continue
        start = time.monotonic()
        images, cost = images_of(way, STEPS, count)
        row = {"cache": way.cache, "setting": way.setting, "steps": STEPS, **cost, **judge(images, expected)}
        rows.add(key, row)
        mean = {name: round(sum(row[name]) / count, 4) for name in ("computed", "psnr", "ssim", "as without")}
        print(key, mean, f"{time.monotonic() - start:.0f} s", flush=True)


def _key(count: int, name: str) -> str:
    return f"{STEPS} steps, {count} captions: {name}"


# -- tables

Row = dict[str, Any]
# The caches with which all others are compared at equal computed steps.
BASELINES = {"first_block": "para_core first_block", "forecast": "para_core first_block, forecast_order=1"}


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Return for each way the means over all captions, and its PSNR relative to para_core's at equal computed steps.

    Args:
        rows: lists with a value for each caption.
    """
    rows_of_ways = []
    for row in sorted(rows, key=lambda x: (x["steps"], x["cache"] != "no cache", -_mean(x["computed"]))):
        summary = {name: row[name] for name in ("cache", "setting", "steps")}
        for name in ("computed", "psnr", "ssim", "right", "as without", "attributes"):
            summary[name] = round(_mean(row[name]), 5)
        summary["least psnr"] = min(row["psnr"])
        for name, cache in BASELINES.items():
            same = [x for x in rows if (x["cache"], x["steps"]) == (cache, row["steps"])]
            summary[f"psnr beside {name}"] = None if row["cache"] in ("no cache", cache) else beside(row, same)
        rows_of_ways.append(summary)
    return rows_of_ways


def beside(row: Row, baseline: Sequence[Row]) -> list[float] | None:
    """Return the mean difference in PSNR from the baseline at as many computed steps, and its standard error. Captions
    are pairs.

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


def quality(summaries: Sequence[Row]) -> list[str]:
    """Return the table of all ways. The JSON has further figures."""
    rows = []
    for row in summaries:
        psnr = "" if row["cache"] == "no cache" else f"{row['psnr']:.1f}"
        difference = row["psnr beside forecast"]
        beside_default = "" if difference is None else f"{difference[0]:+.1f} ± {difference[1]:.1f}"
        rows.append([row["cache"], row["setting"], f"{row['computed']:.1f}", psnr, beside_default])
    right = [row["right"] for row in summaries]
    heads = ["cache", "setting", f"computed of {STEPS}", "PSNR, dB", "PSNR beside para_core's default"]
    return [*markdown_table(heads, rows), "", f"All right: {min(right):.1%} to {max(right):.1%} of the captions."]


def speed(results: dict[str, Any]) -> list[str]:
    """Return the speed-ups of eager and compiled calls, each against no cache measured likewise."""
    compiled = {row["name"]: row for row in results.get("compiled", ())}
    rows = []
    for row in results.get("eager", ()):
        other = compiled.get(row["name"])
        rows.append([row["name"], row.get("computed", ""), _speed_up(row), _speed_up(other), _how(other)])
    return markdown_table(["cache", "computed of 28", "eager", "compiled", "compiled as"], rows)


def _speed_up(row: Row | None) -> str:
    return "" if row is None or "cpu_seconds" not in row else f"{row['speed_up']:.2f} ×"


def _how(row: Row | None) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return "*refused*"
    return "one graph" if row["fullgraph"] else f"**no** `fullgraph`; {row['graphs']} graphs"


def about(results: dict[str, Any]) -> list[str]:
    """Return the date, the device and the versions."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    where = f"{environment['device']}, one thread, Python {environment['python']}"
    return [
        f"{environment['date']}, {where}, {versions}; {results['captions']} held-out captions of one thing, each alone."
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md."""
    return parts_of(read_results("cache_quality"))


def parts_of(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md from ``results``."""
    return {"about": about(results), "28 steps": quality(results["quality"]), "speed": speed(results)}


def record(rows: Rows, count: int) -> None:
    """Write the JSON."""
    captions = [row for key, row in rows.rows.items() if f" {count} captions" in key]
    measured = {name: rows.rows[name] for name in ("eager", "compiled") if name in rows.rows}
    peers = ("diffusers", "scikit-image", *(["cache-dit"] if importlib.util.find_spec("cache_dit") else []))
    print(write_results("cache_quality", {"captions": count, "quality": summaries(captions), **measured}, *peers))


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose name holds it")
    parser.add_argument("--rounds", type=int, default=15, help="of the speed part, which is always measured anew")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "cache_quality", help="what was measured so far")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured so far")
    args = parser.parse_args(arguments)
    if args.fresh:
        shutil.rmtree(args.work, ignore_errors=True)
    torch.set_num_threads(1)
    rows = Rows(args.work / "rows.json")
    if "quality" in args.parts:
        sweep(rows, args.prompts, args.work, args.only)
    for name in ("eager", "compiled"):
        if name in args.parts:
            rows.add(name, measure(args.rounds, compiled=name == "compiled", only=args.only))
    if (args.prompts, args.only) == (PROMPTS, ""):
        # A part of the table replaces nothing.
        record(rows, args.prompts)


if __name__ == "__main__":
    main()
