"""What para_core refuses, and why: the table of docs/refusals.md.

The rows of ``REFUSALS`` (adapters/compatibility/check.py) are read from the code. Combinations of options that are refused elsewhere
are those that ``python -m tests.together --refused`` has tried (benchmarks/results/together.json).
"""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from benchmarks.harness import markdown_table, read_results
from para_core.adapters.compatibility import REFUSALS, Refusal, When

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
    rows: list[dict[str, Any]] = read_results("together")["excluded"]
    return rows


def tried_rows() -> list[list[str]]:
    """The reason, a case of it, the error's class, and its message."""
    return [
        [_cell(row["reason"]), f"`{row['case']}`", f"`{row['error']}`", _cell(row["message"])]
        for row in tried()
        if row["message"]
    ]


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/refusals.md."""
    heads = ["error", "message"]
    return {
        "refusals": markdown_table(["refused", "when", *heads], rows()),
        "combinations": markdown_table(["reason", "for example", *heads], tried_rows()),
    }
