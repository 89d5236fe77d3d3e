"""Forecasts, rules and few steps, at equal computed steps:  python -m benchmarks.cache.forecasts

The tiny trained FLUX generates held-out captions, each alone. For each caption a plain cache chooses the steps. Then
every forecast computes exactly these steps (``compute_steps=``), so that only the forecast differs. PSNR is relative to
the image without a cache, from the same noise. Differences are those of pairs: mean over captions ± standard error.
Writes benchmarks/results/cache_forecasts.json (docs/cache.md).
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cache.judged import SEED, THINGS, decode, judge, mean_and_error, scenes_of
from benchmarks.cache.ways import generate, load
from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.adapters import apply_cache_on_pipe, cache_report, remove_cache_from_pipe
from zoo.flux import scenes as grammar

CAPTIONS = 24
THRESHOLDS = (0.12, 0.2, 0.3)
FORECASTS: dict[str, dict[str, Any]] = {
    "order 1": {"forecast_order": 1},
    "order 0": {"forecast_order": 0},
    "order 2": {"forecast_order": 2},
    "FoCa": {"forecast": "foca"},
}


class Generator:
    """A generator of images of the first held-out captions."""

    def __init__(self) -> None:
        self.pipe = load()
        self.captions = [grammar.caption(scene) for scene in scenes_of(CAPTIONS)]
        self._references: dict[int, np.ndarray] = {}

    def generate(
        self, steps: int, options: Callable[[int], dict[str, Any]] | None
    ) -> tuple[np.ndarray, list[list[int]]]:
        """Return images and the computed steps of each caption. ``options`` are those of a caption's cache, or None."""
        latents, computed = [], []
        for i, caption in enumerate(self.captions):
            if options is not None:
                apply_cache_on_pipe(self.pipe, **options(i))
            latents.append(generate(self.pipe, caption, steps=steps, seed=(SEED + THINGS) * 100_000 + i))
            rows = [] if options is None else cache_report(self.pipe).rows
            computed.append([row.step for row in rows if not row.hit])
        remove_cache_from_pipe(self.pipe)
        return decode(self.pipe, torch.cat(latents)), computed

    def reference(self, steps: int) -> np.ndarray:
        """Return the images without a cache."""
        if steps not in self._references:
            self._references[steps] = self.generate(steps, None)[0]
        return self._references[steps]

    def judged(self, steps: int, options: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        images, computed = self.generate(steps, options)
        judgement = judge(images, self.reference(steps))
        return {"psnr": judgement["psnr"], "as without": judgement["as without"], "steps": computed}


def compared(row: dict[str, Any], baseline: dict[str, Any]) -> list[float]:
    """Return the mean difference in PSNR of the same captions, and its standard error."""
    return mean_and_error([x - y for x, y in zip(row["psnr"], baseline["psnr"], strict=True)])


def summary(name: str, row: dict[str, Any], baseline: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the row for the JSON, and print it."""
    figures = {
        "name": name,
        **settings,
        "computed": round(statistics.mean(map(len, row["steps"])), 2),
        "psnr": round(statistics.mean(row["psnr"]), 2),
        "least psnr": min(row["psnr"]),
        "as without": round(statistics.mean(row["as without"]), 3),
        "psnr difference from the first": compared(row, baseline),
    }
    print(figures, flush=True)
    return figures


def forecasts(generator: Generator) -> list[dict[str, Any]]:
    """Return rows of all forecasts at the steps that a plain cache chooses."""
    rows = []
    for threshold in THRESHOLDS:
        plain: dict[str, Any] = {"residual_diff_threshold": threshold, "forecast_order": 0}
        chosen = generator.generate(28, lambda i, plain=plain: plain)[1]
        baseline: dict[str, Any] = {}
        for name, options in FORECASTS.items():
            row = generator.judged(28, lambda i, o=options, c=chosen: {"compute_steps": c[i], **o})
            baseline = baseline or row
            rows.append(summary(name, row, baseline, threshold=threshold))
        warm = [sorted({*range(4), *steps}) for steps in chosen]
        row = generator.judged(28, lambda i, c=warm: {"compute_steps": c[i], "forecast_order": 1})
        rows.append(summary("order 1, 4 steps of warm-up more", row, baseline, threshold=threshold))
    return rows


# The thresholds of each rule compute about 5 to 16 of 28 steps.
RULES = {
    "first_block": (0.08, 0.11, 0.14, 0.17, 0.21, 0.26, 0.33, 0.4),
    "modulated_input": (0.045, 0.06, 0.075, 0.09, 0.11, 0.135, 0.16, 0.2),
}
COSTS = ("seconds", "share of 57 blocks")


def hit_costs(generator: Generator, rounds: int = 9) -> dict[str, float]:
    """Return, by rule, the median CPU seconds of a skipped step relative to a computed one (8 blocks)."""
    options: dict[str, dict[str, Any]] = {"all": {"compute_steps": range(28)}}
    options |= {name: {"compute_steps": [0], "rule": name} for name in RULES}
    seconds: dict[str, list[float]] = {name: [] for name in options}
    for _ in range(rounds):
        for name, kwargs in options.items():
            apply_cache_on_pipe(generator.pipe, **kwargs)
            start = time.process_time()
            generate(generator.pipe, generator.captions[0], steps=28, seed=0)
            seconds[name].append(time.process_time() - start)
    computed = statistics.median(seconds["all"]) / 28
    return {name: round((statistics.median(seconds[name]) / computed - 1) / 27, 3) for name in RULES}


def rules(generator: Generator) -> list[dict[str, Any]]:
    """Return a curve over thresholds for each rule: PSNR, seconds of steps, and the share of 57 blocks computed."""
    costs, rows = hit_costs(generator), []
    for name, thresholds in RULES.items():
        for threshold in thresholds:
            judged = generator.judged(28, lambda i, t=threshold, n=name: {"residual_diff_threshold": t, "rule": n})
            computed = round(statistics.mean(map(len, judged["steps"])), 2)
            # The costs are relative to those of all 28 steps.
            blocks = 1 / 57 if name == "first_block" else 0.0
            shares = [round((computed + (28 - computed) * at_a_hit) / 28, 4) for at_a_hit in (costs[name], blocks)]
            row = {"name": name, "threshold": threshold, "computed": computed, "cost of a hit": costs[name]}
            rows.append({**row, **dict(zip(COSTS, shares, strict=True)), "psnr": judged["psnr"]})
            print({**rows[-1], "psnr": round(statistics.mean(judged["psnr"]), 2)}, flush=True)
    return [*rows, *[row for cost in COSTS for row in _at_equal(rows, cost)]]


def _at_equal(rows: Sequence[dict[str, Any]], cost: str) -> list[dict[str, Any]]:
    """Return the PSNR of the second rule relative to the first, interpolated to the same cost."""
    first, second = (sorted([row for row in rows if row["name"] == name], key=lambda row: row[cost]) for name in RULES)
    comparisons = []
    for row in second:
        for lower, upper in itertools.pairwise(first):
            if lower[cost] <= row[cost] < upper[cost]:
                weight = (row[cost] - lower[cost]) / (upper[cost] - lower[cost])
                middle = [(1 - weight) * x + weight * y for x, y in zip(lower["psnr"], upper["psnr"], strict=True)]
                described = {"at equal": cost, cost: row[cost], "threshold": row["threshold"]}
                comparisons.append({**described, "psnr difference from first_block": compared(row, {"psnr": middle})})
                print(comparisons[-1], flush=True)
    return comparisons


# These are the computed steps of generations with 4 and 8 steps.
FEW = {
    4: ([0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 2]),
    8: ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 6, 7], [0, 1, 2, 3, 5, 7], [0, 1, 3, 5, 7], [0, 2, 4, 6], [0, 3, 6]),
}


def few(generator: Generator) -> list[dict[str, Any]]:
    """Return rows of skipped steps, compared with the computed number of steps without a cache."""
    rows = []
    for steps, masks in FEW.items():
        for mask in masks:
            fewer = judge(generator.reference(len(mask)), generator.reference(steps))
            baseline = {**fewer, "steps": [list(range(len(mask)))] * len(generator.captions)}
            rows.append(summary(f"{len(mask)} steps, no cache", baseline, baseline, of=steps))
            for order in (0, 1):
                row = generator.judged(steps, lambda i, m=mask, o=order: {"compute_steps": m, "forecast_order": o})
                rows.append(summary(f"steps {mask}, order {order}", row, baseline, of=steps))
    return rows


def few_by_rule(generator: Generator) -> list[dict[str, Any]]:
    """Return PSNR and computed steps of thresholds at 4 and 8 steps."""
    rows = []
    for steps in FEW:
        for threshold in (0.08, 0.2, 0.3, 0.4, 0.6):
            row = generator.judged(steps, lambda i, t=threshold: {"residual_diff_threshold": t})
            rows.append(summary(f"threshold {threshold:g}", row, row, of=steps))
    return rows


PARTS = {"forecasts": forecasts, "rules": rules, "few": few, "few by rule": few_by_rule}


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/cache.md (``few steps by rule``) and docs/measured/cache_quality.md."""
    results = read_results("cache_forecasts")
    return {
        "rules": _rules_table(results["rules"]),
        "forecasts": _forecasts_table(results["forecasts"]),
        "few steps": _few_table(results["few"]),
        "few steps by rule": _by_rule_table(results["few by rule"]),
    }


def _forecasts_table(results: dict[str, Any]) -> list[str]:
    rows = results["rows"]
    thresholds = list(dict.fromkeys(row["threshold"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    of = {(row["threshold"], row["name"]): row for row in rows}
    computed = [of[threshold, names[0]]["computed"] for threshold in thresholds]
    lines = []
    for name in names:
        cells = [_difference(of[threshold, name], name == names[0]) for threshold in thresholds]
        extra = [of[threshold, name]["computed"] - x for threshold, x in zip(thresholds, computed, strict=True)]
        more = [f" ({steps:.1f} steps more)" if steps else "" for steps in extra]
        lines.append([name, *(cell + text for cell, text in zip(cells, more, strict=True))])
    return markdown_table(["forecast", *(f"{x:.1f} of 28 computed" for x in computed)], lines)


def _few_table(results: dict[str, Any]) -> list[str]:
    rows = []
    for fewer, plain, straight in zip(*(results["rows"][i::3] for i in range(3)), strict=True):
        mask = plain["name"].removeprefix("steps ").removesuffix(", order 0")
        rows.append([f"{mask} of {plain['of']}", f"{fewer['psnr']:.1f} dB", _difference(plain), _difference(straight)])
    heads = ["computed", "as many steps, no cache", "`forecast_order=0`", "`forecast_order=1`"]
    return markdown_table(heads, rows)


def _rules_table(results: dict[str, Any]) -> list[str]:
    at_equal = {(row["at equal"], row["threshold"]): row for row in results["rows"] if "at equal" in row}
    rows = []
    for row in (row for row in results["rows"] if row.get("name") == "modulated_input"):
        cells = [at_equal.get((cost, row["threshold"])) for cost in COSTS]
        texts = [
            "" if cell is None else "{:+.1f} ± {:.1f}".format(*cell["psnr difference from first_block"])
            for cell in cells
        ]
        if any(texts):
            psnr = f"{statistics.mean(row['psnr']):.1f} dB"
            rows.append([f"{row['threshold']:g}", f"{row['computed']:.1f}", psnr, *texts])
    return markdown_table(["threshold", "computed of 28", "PSNR", *(f"difference, at equal {x}" for x in COSTS)], rows)


def _by_rule_table(results: dict[str, Any]) -> list[str]:
    rows = []
    for steps in FEW:
        cells = [
            f"{row['computed']:.1f} computed, {row['psnr']:.1f} dB" for row in results["rows"] if row["of"] == steps
        ]
        rows.append([steps, *cells])
    return markdown_table(["steps", *(row["name"] for row in results["rows"] if row["of"] == 8)], rows)


def _difference(row: dict[str, Any], is_first: bool = False) -> str:
    mean, error = row["psnr difference from the first"]
    return f"{row['psnr']:.1f} dB" if is_first else f"{mean:+.1f} ± {error:.1f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure some parts and write them next to the others."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # For some captions, some thresholds skip nothing.
    warnings.filterwarnings("ignore", message="the cache of the .* skipped")
    generator = Generator()
    results = read_results("cache_forecasts")
    for name in args.parts:
        results[name] = {"captions": CAPTIONS, "rows": PARTS[name](generator)}
    print(write_results("cache_forecasts", results, "diffusers"))


if __name__ == "__main__":
    main()
