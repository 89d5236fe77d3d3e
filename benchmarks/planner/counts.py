"""Count the published models for ``para_core plan``:  python -m benchmarks.planner.counts [MODEL ...]

Writes adapters/planner/counts.json, from which the work of a generation of any size follows without torch, and
adapters/planner/runs.json, the seconds of whole generations that others published. Each number is counted at several
sizes, and stored as coefficients that give it at all of them (adapters/planner/stored.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.harness import parser_of
from benchmarks.planner.published_tables import TABLES
from para_core.adapters.planner import count
from para_core.adapters.planner.pipe_workload import counted_workload, published_modules
from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.planner.sizes import GenerationSizes
from para_core.adapters.planner.stored import COUNTS, powers
from para_core.planner.prediction import PublishedRun
from para_core.planner.traffic import CallWork, Operation, Tokens

# Rows, columns and latent frames, in tokens: more than there are quantities, and unequal, so that each has its own
# coefficient. They are so large that no number of image tokens equals a number of text tokens or of features.
GRIDS = ((24, 40, 4), (30, 34, 7), (38, 26, 5), (44, 58, 9), (62, 36, 6), (28, 72, 11), (50, 42, 5), (34, 46, 13))
# Quantities of powers() that may be needed, fewest first.
BASES = (
    ("1",),
    ("1", "tokens"),
    ("1", "area"),
    ("1", "tokens", "area"),
    ("1", "tokens", "frames"),
    ("1", "tokens", "area", "frames"),
    ("1", "tokens", "rows", "columns", "frames"),
    ("1", "tokens", "area", "rows", "columns", "frames"),
)


def counted(name: str) -> dict[str, Any]:
    """Return the entry of counts.json for the published model ``name``."""
    model, modules = PUBLISHED[name], published_modules(name)
    grids = [(rows, columns, frames if model.sizes.frames > 1 else 1) for rows, columns, frames in GRIDS]
    sizes = [sizes_of(model.sizes, *grid) for grid in grids]
    works = [counted_workload(name, x, model.steps, modules) for x in sizes]
    quantities = [powers(x) for x in sizes]
    calls = {
        str(batch): [
            stored_work([work.calls[batch].parts[index] for work in works], quantities)
            for index in range(len(works[0].calls[batch].parts))
        ]
        for batch in (1, 2)
    }
    with count.on_meta():
        decoder = count.decoder_counts(modules.vae, model.latent_channels)
    return {
        "calls": calls,
        "weights": asdict(works[0].weights),
        "encoder": works[0].encoder,
        "decoder": decoder.by_frames,
        "heads": works[0].heads,
    }


def sizes_of(published: GenerationSizes, rows: int, columns: int, frames: int) -> GenerationSizes:
    """Return sizes with this number of rows and columns of tokens, and of latent frames."""
    pixels = 2 * published.spatial
    return replace(
        published, height=rows * pixels, width=columns * pixels, frames=(frames - 1) * published.temporal + 1
    )


def stored_work(parts: Sequence[CallWork], quantities: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return one stored form of the work that was counted at several sizes, in the same order of operations."""
    operations = []
    for at_sizes in zip(*(part.operations.items() for part in parts), strict=True):
        numbers = {number for _, number in at_sizes}
        kinds = {type(operation).__name__ for operation, _ in at_sizes}
        if len(numbers) > 1 or len(kinds) > 1:
            raise ValueError(f"{at_sizes[0]} has another kind or number at another size.")
        operations.append([*numbers, *kinds, stored_operation([x for x, _ in at_sizes], quantities)])
    return {
        "operations": operations,
        "returned": stored_number([part.returned for part in parts], quantities),
        "launches": stored_number([part.launches for part in parts], quantities),
        "moved": [nearly([part.moved[i] for part in parts], quantities) for i in (0, 1)],
        "peak": [nearly([part.peak[i] for part in parts], quantities) for i in (0, 1)],
    }


def stored_operation(at_sizes: Sequence[Operation], quantities: Sequence[dict[str, int]]) -> dict[str, Any]:
    def stored(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return [stored(entries) for entries in zip(*values, strict=True)]
        if isinstance(values[0], Tokens):
            fixed = {(x.sharded, x.min_per_rank) for x in values}
            if len(fixed) > 1:
                raise ValueError(f"{values[0]} is sharded in another way at another size.")
            return [stored_number([x.total for x in values], quantities), *next(iter(fixed))]
        if isinstance(values[0], int):
            return stored_number(values, quantities)
        return values[0]

    return {field.name: stored([getattr(x, field.name) for x in at_sizes]) for field in fields(at_sizes[0])}


def stored_number(values: Sequence[int], quantities: Sequence[dict[str, int]]) -> int | dict[str, float]:
    """Return ``values`` as coefficients of the fewest quantities that give all of them; as an int if they are equal.

    Raises:
        ValueError: No coefficients give all values.
    """
    if len(set(values)) == 1:
        return values[0]
    for basis in BASES:
        coefficients = solved([[x[name] for name in basis] for x in quantities], values)
        if coefficients is not None:
            named = zip(basis, coefficients, strict=True)
            return {name: int(x) if x.denominator == 1 else float(x) for name, x in named if x}
    raise ValueError(f"{list(values)} does not follow from {quantities}.")


def nearly(values: Sequence[int], quantities: Sequence[dict[str, int]]) -> int | dict[str, float]:
    """Return what :func:`stored_number` does, or coefficients that give all values up to a fraction of 0.0002.

    Bytes are not exactly linear where an operator of few bytes reads an expanded tensor.
    """
    try:
        return stored_number(values, quantities)
    except ValueError:
        pass
    for basis in BASES:
        matrix = np.array([[x[name] for name in basis] for x in quantities], dtype=float) / np.array(values)[:, None]
        coefficients = np.linalg.lstsq(matrix, np.ones(len(values)), rcond=None)[0]
        if np.abs(matrix @ coefficients - 1).max() < 2e-4:
            return {name: float(f"{x:.9g}") for name, x in zip(basis, coefficients, strict=True)}
    raise ValueError(f"{list(values)} does not nearly follow from {quantities}.")


def solved(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Return the exact solution of ``rows @ x == values``, with more equations than unknowns; None if there is none."""
    matrix = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    unknowns = len(rows[0])
    for column in range(unknowns):
        pivot = next((i for i in range(column, len(matrix)) if matrix[i][column]), None)
        if pivot is None:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        matrix[column] = [x / matrix[column][column] for x in matrix[column]]
        for i, row in enumerate(matrix):
            if i != column and row[column]:
                matrix[i] = [x - row[column] * y for x, y in zip(row, matrix[column], strict=True)]
    if any(row[-1] for row in matrix[unknowns:]):
        return None
    return [row[-1] for row in matrix[:unknowns]]


def runs() -> list[dict[str, Any]]:
    """Return the published seconds of whole generations, with the model, its sizes and its steps."""
    rows = []
    for table in TABLES:
        # Denoising alone is no generation.
        if table.denoising_alone and not table.tail:
            continue
        model, changed = PUBLISHED[table.model], dict(table.sizes)
        sizes = [changed.get(name, getattr(model.sizes, name)) for name in ("height", "width", "frames")]
        ranks = [(1, table.alone), *[(shape.ranks, seconds) for shape, seconds in table.rows]]
        rows += [
            {
                "model": table.model,
                "sizes": [*sizes, changed.get("steps", model.steps)],
                "run": asdict(
                    PublishedRun(table.name, table.device, count, table.runtime.compiled, seconds, table.source)
                ),
            }
            for count, seconds in ranks
            if seconds is not None
        ]
    return rows


def text(entries: dict[str, Any]) -> str:
    """Return JSON with one operation per line."""
    lines = json.dumps(entries, indent=1, ensure_ascii=False).splitlines()
    whole = ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        whole += f"\n{line}" if indent <= 6 else f" {line.strip()}"
    return whole.strip() + "\n"


def main() -> None:
    """Count and write."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all published models")
    names = parser.parse_args().models or list(PUBLISHED)
    entries = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    for name in names:
        entries[name] = json.loads(json.dumps(counted(name)))
        print(name, flush=True)
    COUNTS.write_text(text({name: entries[name] for name in PUBLISHED if name in entries}))
    COUNTS.with_name("runs.json").write_text(json.dumps(runs(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
