"""The tables of docs/refusals.md: all checks of a parallel pipeline and a cache, and combinations that were tried.

Measures nothing: reads the checks of the library, and the results of ``python -m tests.together``.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import markdown_table, read_results
from para_core.adapters.cache.checks import check_cache, check_cached_call
from para_core.adapters.compatibility.checks import check_parallel_call, check_parallelize
from para_core.adapters.denoisers import denoiser_kinds
from para_core.adapters.weights.features import features
from para_core.adapters.weights.shard import check_can_be_sharded

# These fields of messages are the same in all cases. Every other field is an ellipsis on the page.
_WORDS = {
    "name": "pipe.transformer",
    "original_class(owner).__name__": "the pipeline",
    "original_class(pipe).__name__": "the pipeline",
    "original_class(module).__name__": "the transformer's class",
    "'.module' * _depth_of(inner, module)": ".module",
}


# The checks of each phase, by the name of the phase in docs/refusals.md.
PHASES: Mapping[str, Callable[..., None]] = {
    "`parallelize_pipe`": check_parallelize,
    "a parallel call": check_parallel_call,
    "`apply_cache_on_pipe`": check_cache,
    "a cached call": check_cached_call,
    "`shard_weights`": check_can_be_sharded,
}
# The field of a feature of weights that has its checks of a phase.
_CHECKS_OF_FEATURES = {
    "check_parallelize": "parallelize_checks",
    "check_parallel_call": "call_checks",
    "check_cached_call": "cached_call_checks",
}


def checks_of(phase: Callable[..., None]) -> list[Callable[..., None]]:
    """Return the checks that ``phase`` calls, in order, and those of kinds of denoisers and of features of weights."""
    phases = [phase, *[getattr(kind, phase.__name__, None) for kind in denoiser_kinds()]]
    functions = [
        function for of_kind in phases if of_kind for function in inspect.getclosurevars(of_kind).globals.values()
    ]
    for feature in features().values():
        for check in getattr(feature, _CHECKS_OF_FEATURES.get(phase.__name__, ""), ()):
            is_one_check = (check.__doc__ or "").startswith("Refuse ")
            functions += [check] if is_one_check else checks_of(check)
    return [function for function in functions if (function.__doc__ or "").startswith("Refuse ")]


def errors_of(check: Callable[..., None]) -> tuple[str, str]:
    """Return the class of the errors that ``check`` raises, and the advice, without the parts that differ by case."""
    tree = ast.parse(inspect.getsource(check))
    raised: list[Any] = [node.exc for node in ast.walk(tree) if _is_new_error(node)]
    raised.sort(key=lambda error: error.lineno)
    advice = []
    for error in raised:
        field = error.args[2] if error.func.id == "refusal" else None
        advice.append(way_out(_text(error.args[0])) if field is None else _text(field))
    kind = raised[0].args[0] if raised[0].func.id == "refusal" else raised[0].func
    return kind.id, _cell(" ".join(dict.fromkeys(advice)))


def _is_new_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)


def _text(message: Any) -> str:
    """Return the text of a string or an f-string, with an ellipsis for parts that differ from case to case."""
    parts = getattr(message, "values", [message])
    return "".join(
        part.value if isinstance(part, ast.Constant) else _WORDS.get(ast.unparse(part.value), "…") for part in parts
    )


def _cell(text: str) -> str:
    """Return text for a cell of a table, with markup escaped."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def refused_rows() -> list[list[str]]:
    """Return a row for each check: what it refuses, in which phases, the error's class, and the advice."""
    phases: dict[Callable[..., None], list[str]] = {}
    for name, phase in PHASES.items():
        for check in checks_of(phase):
            phases.setdefault(check, []).append(name)
    rows = []
    for check, names in phases.items():
        combination = inspect.cleandoc(check.__doc__ or "").splitlines()[0]
        error, advice = errors_of(check)
        title = combination.removeprefix("Refuse ").removesuffix(".")
        rows.append([_cell(title), ", ".join(names), f"`{error}`", advice])
    return rows


def way_out(message: str) -> str:
    """Return the sentences of a message after the first. The first one gives the reason, and the others say what to do.

    >>> way_out("pipe runs in stages. Use a mesh without 'pipe'.")
    "Use a mesh without 'pipe'."
    >>> way_out("it cannot run: there is no transformer.")
    ''
    """
    _, *rest = re.split(r"(?<=\.) (?=[A-Z])", message)
    return " ".join(rest)


def tried_combinations() -> list[str]:
    """Return how many cases were refused, and the list of reasons. The JSON has a case and the message of each."""
    rows = [row for row in read_results("together")["excluded"] if row["message"]]
    refused, cases = (sum(row[count] for row in rows) for count in ("refused", "tried"))
    reasons = [f"- {_cell(row['reason'])}" for row in rows]
    return [f"{refused} of {cases} cases that were tried were refused.", "", *reasons]


def covering_array() -> list[str]:
    """Return a sentence on the results of all cases of the covering array."""
    results = read_results("together")
    counts, pairs = results["statuses"], results["pairs"]
    names = {"exact": "exact", "refused": "refused", "wrong": "wrong", "obscure": "unexplained errors", "hang": "hangs"}
    outcomes = ", ".join(f"{counts.get(status, 0)} {name}" for status, name in names.items())
    sentence = (
        f"{results['cases']} cases ({results['compiled']} compiled): {outcomes}. {pairs['held by exact cases']} of "
        f"{pairs['admissible']} pairs of values occur in exact cases. Largest error in float32: "
        f"{results['largest error in float32']:.1e}."
    )
    return [sentence]


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/refusals.md."""
    rows = [[title, phases, advice] for title, phases, _, advice in refused_rows()]
    return {
        "refusals": markdown_table(["refused", "when", "what to do"], rows),
        "covering array": covering_array(),
        "combinations": tried_combinations(),
    }
