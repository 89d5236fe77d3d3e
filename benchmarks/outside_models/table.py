"""The table of docs/any_model.md. Imports no model, so that the tests of pages are quick."""

from __future__ import annotations

from typing import Any

RANKS, KINDS = (2, 3), ("ring", "ulysses")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """For docs/any_model.md."""
    heads = [f"{ranks} ranks, {kind.replace('ulysses', 'Ulysses')}" for ranks in RANKS for kind in KINDS]
    lines = [f"| model | recipe | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    for row in rows:
        cells = [row["errors"][f"{ranks} {kind}"] for ranks in RANKS for kind in KINDS]
        lines.append(f"| {row['model']} | {row['way']} | {' | '.join(f'{x:.0e}' if x else '0' for x in cells)} |")
    return lines
