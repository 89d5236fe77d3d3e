"""Caches compared: computed steps, likeness to the images without a cache, and speed.

    python -m benchmarks.cache.quality
    python -m benchmarks.cache.quality --parts eager compiled --rounds 25  # the seconds only, on a quiet machine

Generates held-out captions with the tiny trained FLUX, each alone, because a cache decides for a whole call. Writes
benchmarks/results/cache_quality.json (docs/measured/cache_quality.md). cache-dit is measured if it is installed: ``pip
install --no-deps cache-dit==1.5.3``, into an environment that is not para_core's.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from benchmarks.cache.judged import images_of, judge, mean_and_error
from benchmarks.cache.speed import measure
from benchmarks.cache.ways import NO_CACHE, QUALITY
from benchmarks.harness import markdown_table, parser_of, read_results, write_results

PARTS = ("quality", "eager", "compiled")
STEPS, CAPTIONS = 28, 64
Row = dict[str, Any]


def sweep(count: int) -> list[Row]:
    """Return a row for each installed way, with a value for each of ``count`` captions."""
    expected, cost = images_of(NO_CACHE, STEPS, count)
    rows: list[Row] = [{"cache": NO_CACHE.name, "setting": "", "steps": STEPS, **cost, **judge(expected, expected)}]
    for way in QUALITY:
        if not way.installed:
            print(f"{way.name}: {way.package} is not installed")
            continue
        images, cost = images_of(way, STEPS, count)
        rows.append({"cache": way.cache, "setting": way.setting, "steps": STEPS, **cost, **judge(images, expected)})
        means = {name: round(fmean(rows[-1][name]), 4) for name in ("computed", "psnr", "ssim", "as without")}
        print(way.name, means, flush=True)
    return rows


# -- Tables.

# All other caches are compared with these at equal computed steps.
BASELINES = {"first_block": "para_core first_block", "forecast": "para_core first_block, forecast_order=1"}


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Return for each way the means over all captions, and its PSNR relative to para_core's at equal computed steps.

    Args:
        rows: lists with a value for each caption.
    """
    rows_of_ways = []
    for row in sorted(rows, key=lambda x: (x["steps"], x["cache"] != "no cache", -fmean(x["computed"]))):
        summary = {name: row[name] for name in ("cache", "setting", "steps")}
        for name in ("computed", "psnr", "ssim", "right", "as without"):
            summary[name] = round(fmean(row[name]), 5)
        summary["least psnr"] = min(row["psnr"])
        for name, cache in BASELINES.items():
            same = [x for x in rows if (x["cache"], x["steps"]) == (cache, row["steps"])]
            summary[f"psnr difference from {name}"] = (
                None if row["cache"] in ("no cache", cache) else psnr_difference(row, same)
            )
        rows_of_ways.append(summary)
    return rows_of_ways


def psnr_difference(row: Row, baseline: Sequence[Row]) -> list[float] | None:
    """Return the mean difference in PSNR from the baseline at as many computed steps, and its standard error. Captions
    are pairs.

    Between two of its thresholds the baseline is their mean, weighted so that it computes the same number of steps.

    >>> row = {"computed": [4, 6], "psnr": [30.0, 34.0]}
    >>> psnr_difference(row, [{"computed": [3, 3], "psnr": [20.0, 20.0]}, {"computed": [7, 7], "psnr": [30.0, 32.0]}])
    [6.5, 1.5]
    """
    wanted = fmean(row["computed"])
    ordered = sorted(baseline, key=lambda x: fmean(x["computed"]))
    for lower, upper in itertools.pairwise(ordered):
        low, high = fmean(lower["computed"]), fmean(upper["computed"])
        # Half a step beyond the ends of the curve counts as the same number.
        if low - 0.5 <= wanted <= high + 0.5:
            weight = (wanted - low) / (high - low)
            differences = [
                x - (1 - weight) * a - weight * b
                for x, a, b in zip(row["psnr"], lower["psnr"], upper["psnr"], strict=True)
            ]
            return mean_and_error(differences)
    return None


def quality(summaries: Sequence[Row]) -> list[str]:
    """Return the table of all ways. The JSON has further figures."""
    rows = []
    for row in summaries:
        psnr = "" if row["cache"] == "no cache" else f"{row['psnr']:.1f}"
        difference = row["psnr difference from forecast"]
        from_default = "" if difference is None else f"{difference[0]:+.1f} ± {difference[1]:.1f}"
        rows.append([row["cache"], row["setting"], f"{row['computed']:.1f}", psnr, from_default])
    right = [row["right"] for row in summaries]
    heads = ["cache", "setting", f"computed of {STEPS}", "PSNR, dB", "PSNR, difference from para_core's default"]
    return [*markdown_table(heads, rows), "", f"All right: {min(right):.1%} to {max(right):.1%} of the captions."]


def speed(results: dict[str, Any]) -> list[str]:
    """Return the speed-ups of eager and compiled calls, each relative to no cache measured in the same way."""
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


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md."""
    return parts_of(read_results("cache_quality"))


def parts_of(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parts of docs/measured/cache_quality.md from ``results``."""
    return {"about": about(results), "28 steps": quality(results["quality"]), "speed": speed(results)}


def main(arguments: list[str] | None = None) -> None:
    """Measure some parts and write them next to the others."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=15, help="of the seconds")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = read_results("cache_quality")
    if "quality" in args.parts:
        results |= {"captions": CAPTIONS, "quality": summaries(sweep(CAPTIONS))}
    for name in ("eager", "compiled"):
        if name in args.parts:
            results[name] = measure(args.rounds, compiled=name == "compiled")
    peers = ("diffusers", "scikit-image", *(["cache-dit"] if importlib.util.find_spec("cache_dit") else []))
    print(write_results("cache_quality", results, *peers))


if __name__ == "__main__":
    main()
