"""Write the outcomes of all cases to one JSON: benchmarks/results/together.json."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import write_results
from tests.together.covering import SEED, admissible_pairs, pairs_of, read_cases, refused_cases
from tests.together.run import FLOAT32_BOUND


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of cases by status, the pairs that exact cases hold, and the error of each exclusion.

    Args:
        rows: the rows that ``python -m tests.together --out`` wrote, by case.
    """
    ran = {case: rows[case.id] for case in read_cases() if case.id in rows}
    exact = [case for case, row in ran.items() if row["status"] == "exact"]
    admissible = set(admissible_pairs())
    held = {pair for case in exact for pair in pairs_of(case.by_axis)} & admissible
    float32 = [rows[case.id]["error"] for case in exact if case["dtype"] == "float32"]
    return {
        "seed": SEED,
        "cases": len(ran),
        "statuses": dict(collections.Counter(row["status"] for row in ran.values())),
        "compiled": sum(case["compile"] != "eager" for case in ran),
        "ranks": dict(sorted(collections.Counter(str(case.ranks) for case in ran).items())),
        "largest error in float32": max(float32, default=0.0),
        "bound in float32": FLOAT32_BOUND,
        "pairs": {"admissible": len(admissible), "held by exact cases": len(held)},
        "excluded": excluded(rows),
    }


def excluded(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each refused combination with its reason, the number of cases that ran, and the error of one of them."""
    entries: dict[str, dict[str, Any]] = {}
    for case, exclusion in refused_cases():
        row = rows.get(case.id)
        if row is None:
            continue
        entry = entries.setdefault(
            exclusion.reason, {"reason": exclusion.reason, "tried": 0, "refused": 0, "case": case.id, "message": ""}
        )
        entry["tried"] += 1
        entry["refused"] += row["status"] == "refused"
        if row["status"] == "refused" and not entry["message"]:
            _, error, message = row["detail"].split(": ", 2)
            entry |= {"case": case.id, "error": error.partition(" ")[0], "message": message}
    return list(entries.values())


def write_summary(rows: Mapping[str, Mapping[str, Any]]) -> Path:
    return write_results("together", summary(rows), "diffusers", "transformers", "peft", "torchao")
