"""Count the published models for ``para_core plan``:  python -m benchmarks.planner.counts [MODEL ...]

Writes adapters/planner/counts.json, from which the work of a generation of any size follows without torch. Each number
is counted at several sizes, and stored as the coefficients ``[a, b]`` of ``a + b * tokens`` of the image or video.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.harness import parser_of
from benchmarks.planner.published_models import PUBLISHED, counted_workload, published_modules
from para_core.adapters.planner.published import COUNTS
from para_core.adapters.planner.work import CallWork, GenerationSizes

# Rows, columns and latent frames, in tokens.
GRIDS = ((24, 40, 4), (38, 26, 5), (44, 58, 9), (62, 66, 12))
# The largest error of a number that is stored as two coefficients. Bytes are not exactly linear in the tokens.
LARGEST_ERROR = 0.01


def counted(name: str) -> dict[str, Any]:
    """Return the entry of counts.json for the published model ``name``."""
    model, modules = PUBLISHED[name], published_modules(name)
    grids = [(rows, columns, frames if model.sizes.frames > 1 else 1) for rows, columns, frames in GRIDS]
    works = [counted_workload(name, sizes_of(model.sizes, *grid), model.steps, modules) for grid in grids]
    return {
        "repository": model.repository,
        "sizes": asdict(model.sizes),
        "steps": model.steps,
        "branches": works[0].branches,
        "batched": works[0].batched,
        "heads": works[0].heads,
        "weights": asdict(works[0].weights),
        "call": stored_call(
            [work.call for work in works], [rows * columns * frames for rows, columns, frames in grids]
        ),
    }


def sizes_of(published: GenerationSizes, rows: int, columns: int, frames: int) -> GenerationSizes:
    """Return sizes with this number of rows and columns of tokens, and of latent frames."""
    pixels = 2 * published.spatial
    return replace(
        published, height=rows * pixels, width=columns * pixels, frames=(frames - 1) * published.temporal + 1
    )


def stored_call(calls: Sequence[CallWork], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the stored form of the work of a call that was counted with these numbers of ``tokens``."""
    attention = []
    for at_sizes in zip(*(call.attention for call in calls), strict=True):
        fixed = asdict(at_sizes[0])
        for name in ("queries", "keys"):
            fixed[name] = coefficients([getattr(x, name) for x in at_sizes], tokens)
        attention.append(fixed)
    names = ("products", "moved", "summed")
    numbers = {name: coefficients([getattr(call, name) for call in calls], tokens) for name in names}
    peak = [coefficients([call.peak[i] for call in calls], tokens) for i in (0, 1)]
    return {"attention": attention, **numbers, "peak": peak, "launches": calls[0].launches}


def coefficients(values: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return ``[a, b]`` such that ``a + b * tokens`` gives all ``values``.

    Raises:
        ValueError: No coefficients give all values, up to ``LARGEST_ERROR``.
    """
    if len(set(values)) == 1:
        return [values[0], 0]
    scale = np.abs(np.array(values, dtype=float)) + 1.0
    matrix = np.stack([np.ones(len(tokens)), np.array(tokens, dtype=float)], axis=1) / scale[:, None]
    solution = np.linalg.lstsq(matrix, np.array(values) / scale, rcond=None)[0]
    if np.abs(matrix @ solution - np.array(values) / scale).max() > LARGEST_ERROR:
        raise ValueError(f"{list(values)} do not follow from {list(tokens)} tokens.")
    return [float(f"{x:.9g}") for x in solution]


def main() -> None:
    """Count and write."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all published models")
    names = parser.parse_args().models or list(PUBLISHED)
    entries = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    for name in names:
        entries[name] = counted(name)
        print(name, flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in PUBLISHED if name in entries]
    COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
