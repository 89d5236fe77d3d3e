"""Caches beside each other: computed steps, likeness to the images without a cache, and speed.

    python -m benchmarks.cache.quality                                    # stop it at any time, and start it again
    python -m benchmarks.cache.quality --parts eager compiled --rounds 25     # the seconds only, on a quiet machine
    python -m benchmarks.cache.quality --parts                               # only write the page from what is there

Generates held-out captions with the tiny trained FLUX, each alone: a cache decides for a call as a whole. Writes
benchmarks/results/cache_quality.json and docs/cache_quality.md. cache-dit is measured where it is installed:
``pip install --no-deps cache-dit==1.5.3``, into an environment that is not para_core's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cache.judged import images_of, judge, reference
from benchmarks.cache.page import render, summaries
from benchmarks.cache.speed import measure, short
from benchmarks.cache.ways import NO_CACHE, OTHERS, QUALITY
from benchmarks.environment import write_results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cache_quality.md"
PROMPTS = 64
PARTS = ("quality", "others", "eager", "compiled")


class Rows:
    """What was measured, by its key; written whenever a row is added."""

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


def sweep(rows: Rows, count: int, folder: Path, steps: int, only: str = "") -> None:
    """Each way at a number of steps, unless it is there."""
    expected, cost = reference(steps, count, folder)
    if _key(steps, count, NO_CACHE.name) not in rows.rows:
        row = {"cache": NO_CACHE.name, "setting": "", "steps": steps}
        rows.add(_key(steps, count, NO_CACHE.name), {**row, **cost, **judge(expected, expected)})
    for way in QUALITY[steps]:
        key = _key(steps, count, way.name)
        if key in rows.rows or only not in way.name:
            continue
        if not way.installed:
            print(f"{key}: {way.package} is not installed")
            continue
        start = time.monotonic()
        images, cost = images_of(way, steps, count)
        row = {"cache": way.cache, "setting": way.setting, "steps": steps, **cost, **judge(images, expected)}
        rows.add(key, row)
        mean = {name: round(sum(row[name]) / count, 4) for name in ("computed", "psnr", "ssim", "as without")}
        print(key, mean, f"{time.monotonic() - start:.0f} s", flush=True)


def others() -> list[dict[str, Any]]:
    """What becomes of the caches that cannot be compared at equal computed steps; 28 steps, two captions."""
    expected, _ = images_of(NO_CACHE, 28, 2)
    rows = []
    for way in OTHERS:
        row: dict[str, Any] = {"name": way.name}
        try:
            images, cost = images_of(way, 28, 2)
        except Exception as error:
            row["refused"] = short(error)
        else:
            row["attention computed"] = cost["computed"]
            row["psnr"] = judge(images, expected)["psnr"]
        rows.append(row)
    return rows


def _key(steps: int, count: int, name: str) -> str:
    return f"{steps} steps, {count} captions: {name}"


def record(rows: Rows, count: int, result: str = "cache_quality", page: Path = PAGE) -> None:
    """Write the JSON and the page."""
    quality = [row for key, row in rows.rows.items() if f" {count} captions" in key]
    parts = {name: rows.rows[name] for name in ("eager", "compiled", "others") if name in rows.rows}
    found = {"captions": count, "quality": summaries(quality), **parts}
    peers = ("diffusers", "scikit-image", *(["cache-dit"] if importlib.util.find_spec("cache_dit") else []))
    path = write_results(result, found, *peers)
    page.write_text(render(page.read_text(), json.loads(path.read_text())))
    print(path, page, sep="\n")


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--steps", type=int, nargs="+", default=list(QUALITY), choices=list(QUALITY))
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
        for steps in args.steps:
            sweep(rows, args.prompts, args.work, steps, args.only)
    if "others" in args.parts:
        rows.add("others", others())
    for name in ("eager", "compiled"):
        if name in args.parts:
            rows.add(name, measure(args.rounds, compiled=name == "compiled", only=args.only))
    if (args.prompts, args.only) == (PROMPTS, ""):
        # A part of the table replaces nothing.
        record(rows, args.prompts)


if __name__ == "__main__":
    main()
