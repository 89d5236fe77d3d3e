"""What para_core refuses, and why: the table of docs/refusals.md.

    python -m benchmarks.refusals_table

The rows of ``REFUSALS`` (adapters/compatibility/check.py) are read from the code. Combinations of options that are refused elsewhere
are those that ``python -m tests.together --refused`` has tried (benchmarks/results/together.json).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.environment import RESULTS
from benchmarks.page_parts import fill
from para_core.adapters.compatibility import REFUSALS, Refusal, When

PAGE = Path(__file__).parents[1] / "docs/refusals.md"
_WHEN = {
    When.PARALLELIZE: "`parallelize_pipe`",
    When.PARALLEL_CALL: "a parallel call",
    When.CACHE: "`apply_cache_on_pipe`",
    When.CACHED_CALL: "a cached call",
    When.SHARD: "`shard_weights`",
}
# What a sentence says of any case; all else is an ellipsis on the page.
_WORDS = {"name": "pipe.transformer", "owner": "the pipeline", "cls": "the transformer's class"}


def sentence_of(refusal: Refusal) -> str:
    """The sentence of a row, with words in place of what differs from case to case."""
    parts = []
    for text, field, _, _ in Formatter().parse(refusal.sentence):
        parts += [text, "" if field is None else _WORDS.get(field, "…")]
    return _cell("".join(parts))


def _cell(text: str) -> str:
    """Text that stands in a cell of a table, without markup of its own."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def rows() -> list[list[str]]:
    """What is refused, before what, the error's class, and its message."""
    return [
        [
            _cell(refusal.what),
            ", ".join(_WHEN[when] for when in refusal.when),
            f"`{refusal.error.__name__}`",
            sentence_of(refusal),
        ]
        for refusal in REFUSALS
    ]


def tried() -> list[dict[str, Any]]:
    """Combinations of options that were tried, and what they raised."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / "together.json").read_text())["excluded"]
    return rows


def tried_rows() -> list[list[str]]:
    """The reason, a case of it, the error's class, and its message."""
    return [
        [_cell(row["reason"]), f"`{row['case']}`", f"`{row['error']}`", _cell(row["message"])]
        for row in tried()
        if row["message"]
    ]


def table(heads: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *body)]


def write_page() -> None:
    parts = {
        "refusals": table(["refused", "when", "error", "message"], rows()),
        "combinations": table(["reason", "for example", "error", "message"], tried_rows()),
    }
    PAGE.write_text(fill(PAGE.read_text(), parts))


if __name__ == "__main__":
    write_page()
    print(PAGE)
