"""The generated parts of docs/measured/peers.md, from benchmarks/results/peers.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.harness import markdown_table, read_results

Ways = dict[str, dict[str, Any]]

# Only para_core has this input: a peer takes each rank's copy for more text.
NO_NOTION = "text replicated + image sharded"
# A kernel of a GPU would have to run. README.md calls it "not run".
STAND_IN = "refused by our stand-in"
# The table in README.md has these columns, with the attention that the library's pipelines call.
SUMMARY = {
    "para_core": "para_core",
    "diffusers' context parallelism": "diffusers",
    "ParaAttention": "ParaAttention",
    "xDiT": "xDiT",
}
SUMMARY_ROWS = {
    "any length (101 tokens)": "101 tokens: no number of ranks divides them",
    "any number of heads (3)": "3 heads",
    "a mask of keys": "bool mask of keys `[B, 1, 1, S]`",
    "text replicated, image sharded": NO_NOTION,
    "`torch.compile(fullgraph=True)`": "`torch.compile(fullgraph=True)`",
}


def cell(ways: Ways, row: str = "", peer: str = "", *, brief: bool = False) -> str:
    """Return one word if all ways agree, otherwise the outcome of each way. ``brief`` omits errors of inputs that are
    not offered.

    >>> cell({"Ulysses": {"verdict": "exact"}, "ring": {"verdict": "refused"}, "2 × 2": {"verdict": "refused"}})
    'Ulysses: exact; ring, 2 × 2: *refused*'
    """
    words: dict[str, list[str]] = {}
    for way, outcome in ways.items():
        word = _word(outcome, row, peer)
        words.setdefault(word.split(": each copy")[0] if brief else word, []).append(way)
    if len(words) == 1:
        return next(iter(words))
    return "; ".join(f"{', '.join(which)}: {word}" for word, which in words.items())


def kind(outcome: dict[str, Any], row: str = "", peer: str = "") -> str:
    """Return the verdict in more detail: whether the peer offers this input, and who refused it.

    >>> kind({"verdict": "refused", "message": "TypeError: f() got an unexpected keyword argument 'attn_mask'"})
    'not offered'
    >>> kind({"verdict": "refused", "message": "RuntimeError: attn_bias does not fit scores (stand-in)"})
    'refused by our stand-in'
    """
    word, message = str(outcome["verdict"]), outcome.get("message", "")
    if word == "refused" and "unexpected keyword argument" in message:
        return "not offered"
    if word == "refused" and message.endswith("(stand-in)"):
        return STAND_IN
    if word == "wrong" and row == NO_NOTION and peer != "para_core":
        return "not offered"
    return word


def _word(outcome: dict[str, Any], row: str, peer: str) -> str:
    word = kind(outcome, row, peer)
    if word == "exact":
        by_hand = outcome.get("setting", {}).get("by hand")
        return f"exact ({'mask sharded by hand' if by_hand is True else by_hand})" if by_hand else word
    if outcome["verdict"] == "wrong":
        error = f"{outcome['error']:.2g}"
        return (
            f"*not offered*: each copy counts as more text, off by {error}"
            if word != "wrong"
            else f"**wrong** by {error}"
        )
    return f"**{word}**" if word in ("crashes", "hangs") else f"*{word}*"


def table(cells: dict[str, dict[str, Ways]]) -> list[str]:
    """Return a column per peer, and one row for all inputs with equal results."""
    inputs: dict[tuple[str, ...], list[str]] = {}
    for row in dict.fromkeys(row for column in cells.values() for row in column):
        results = tuple(cell(column[row], row, peer, brief=True) for peer, column in cells.items())
        inputs.setdefault(results, []).append(row)
    return markdown_table(["", *cells], [["; ".join(rows), *results] for results, rows in inputs.items()])


def own(results: dict[str, Any]) -> list[str]:
    """Return the outcomes of the rows that only some libraries ran, and how they compute the uneven row by default."""
    rows = []
    uneven = SUMMARY_ROWS["any length (101 tokens)"]
    for peer in ("xDiT", "SGLang", "vLLM-Omni"):
        attempts = {way: [out, *out.get("other attempts", [])] for way, out in results["cells"][peer][uneven].items()}
        default = {way: next(x for x in each if "by hand" not in x["setting"]) for way, each in attempts.items()}
        rows.append([peer, "101 tokens, without an option", cell(default)])
    rows += [[peer, row, cell(ways)] for peer, by_row in results["own rows"].items() for row, ways in by_row.items()]
    for peer, facts in results["facts"].items():
        for fact, by_ranks in facts.items():
            changed = {ranks: number for ranks, number in by_ranks.items() if number != by_ranks["1"]}
            words = ", ".join(f"{number} on {ranks} GPUs" for ranks, number in changed.items())
            rows.append([peer, fact, words or f"the same on {', '.join(by_ranks)} GPUs"])
    return markdown_table(["", "asked", "found"], rows)


def summary(results: dict[str, Any]) -> list[str]:
    """Return the table of README.md: how many cells of each peer have each outcome, and the most telling inputs."""
    cells, versions = results["cells"], results["versions of the peers"]
    numbers = {
        "diffusers": versions["diffusers"],
        "ParaAttention": versions["para-attn"],
        "xDiT": versions["xfuser"],
    }
    heads = [f"{name} {numbers.get(name, '')}".strip() for name in SUMMARY.values()]
    counts = {
        peer: Counter(kind(outcome, row, peer) for row, ways in cells[peer].items() for outcome in ways.values())
        for peer in SUMMARY
    }
    total = sum(next(iter(counts.values())).values())
    every = ("exact", "not offered", "refused", STAND_IN, "wrong", "crashes", "hangs")
    words = [word for word in every if any(count[word] for count in counts.values())]
    rows = [[word.replace(STAND_IN, "not run"), *(counts[peer][word] for peer in SUMMARY)] for word in words]
    inputs = [
        [name, *(cell(cells[peer][row], row, peer, brief=True).replace(STAND_IN, "not run") for peer in SUMMARY)]
        for name, row in SUMMARY_ROWS.items()
    ]
    return markdown_table([f"of {total} cells", *heads], [*rows, *inputs])


def about(results: dict[str, Any]) -> list[str]:
    """Return the date, the device and the versions."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions of the peers"].items())
    where = f"{environment['device']}, Python {environment['python']}"
    dates: dict[str, list[str]] = {}
    for column, date in results["dates"].items():
        dates.setdefault(date, []).append(column)
    first, *later = sorted(dates)
    when = "; ".join([first, *(f"{', '.join(dates[date])}: {date}" for date in later)])
    return [f"{when}; {where}, {versions}; {results['backend']}."]


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/peers.md, and the table of README.md (``peers``)."""
    results = read_results("peers")
    return {"about": about(results), "table": table(results["cells"]), "own": own(results), "peers": summary(results)}
