"""The generated parts of docs/peers.md, from benchmarks/results/peers.json."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.page_parts import fill

Ways = dict[str, dict[str, Any]]


def cell(ways: Ways) -> str:
    """One word where all ways agree, otherwise which way does what.

    >>> cell({"Ulysses": {"verdict": "exact"}, "ring": {"verdict": "refused"}, "2 × 2": {"verdict": "refused"}})
    'Ulysses: exact; ring, 2 × 2: *refused*'
    """
    words: dict[str, list[str]] = {}
    for way, outcome in ways.items():
        words.setdefault(_word(outcome), []).append(way)
    if len(words) == 1:
        return next(iter(words))
    return "; ".join(f"{', '.join(which)}: {word}" for word, which in words.items())


def _word(outcome: dict[str, Any]) -> str:
    word = outcome["verdict"]
    if word == "exact":
        return "exact (mask sharded by hand)" if outcome.get("setting", {}).get("by hand") else word
    if word == "wrong":
        return f"**wrong** by {outcome['error']:.2g}"
    return f"*{word}*" if word in ("refused", "needs CUDA") else f"**{word}**"


def table(cells: dict[str, dict[str, Ways]]) -> list[str]:
    """A row per input, a column per peer."""
    rows = dict.fromkeys(row for column in cells.values() for row in column)
    return [
        f"| | {' | '.join(cells)} |",
        "| --- " * (len(cells) + 1) + "|",
        *(f"| {row} | {' | '.join(cell(column[row]) for column in cells.values())} |" for row in rows),
    ]


def messages(cells: dict[str, dict[str, Ways]]) -> list[str]:
    """What was raised, each once: two that differ in numbers only count as one."""
    lines = []
    for peer, column in cells.items():
        found: dict[str, list[str]] = {}
        shown: dict[str, str] = {}
        for row, ways in column.items():
            for way, outcome in ways.items():
                if "message" not in outcome:
                    continue
                kind = re.sub(r"\d+", "#", outcome["message"])
                shown.setdefault(kind, outcome["message"].replace("`", "'"))
                found.setdefault(kind, []).append(f"{row}, {way}")
        for kind, where in found.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            lines.append(f"- {peer}: `{_short(shown[kind])}` ({where[0]}{more})")
    return lines


def _short(message: str, length: int = 160) -> str:
    return message if len(message) <= length else message[: length - 2] + " …"


def patches(results: dict[str, Any]) -> list[str]:
    """What was changed to run each peer on a CPU."""
    return [f"- {peer}: {line}" for peer, lines in results["patches"].items() for line in lines]


def about(results: dict[str, Any]) -> list[str]:
    """When, where, with which versions."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions of the peers"].items())
    where = f"{environment['device']}, Python {environment['python']}"
    return [f"{environment['date']}, {where}, {versions}; {results['backend']}."]


def render(text: str, results: dict[str, Any]) -> str:
    """The page with every part between ``<!-- name -->`` and ``<!-- end of name -->`` written anew."""
    parts = {
        "about": about(results),
        "table": table(results["cells"]),
        "patches": patches(results),
        "unpatched": table(results["unpatched"]),
        "messages": messages(results["cells"]),
    }
    return fill(text, parts)
