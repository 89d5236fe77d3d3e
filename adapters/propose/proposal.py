"""The result of :func:`propose_plan`, and its Python source in the form of the modules in adapters/models/.

``search.py`` and ``propose.py`` make it, and ``completion.py`` adds to it. Nothing is guessed or checked
here. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Plan

# Columns of a line of source, as the formatter leaves the modules of adapters/models/.
_WIDTH = 110


@dataclass(frozen=True)
class Proposal:
    """The result of :func:`propose_plan`: a checked plan, or questions. ``print`` shows it.

    Args:
        transformer (`str`): Name of the model's class.
        plan, blocks (`Plan`, `CachedBlocks`, *optional*): A plan, and a block stack for First Block Cache,
            that were exact in the check. None if no guess was.
        error, blocks_error (`float`, *optional*): The largest ``‖out − expected‖ / ‖expected‖`` of the plan
            on virtual ranks, and of a call that skips blocks. ``expected`` is the output of the unmodified
            model.
        reasons (`tuple[str, ...]`): A sentence for each guess.
        questions (`tuple[str, ...]`): What the user must state in ``answers``.
        guess (`Plan`, *optional*): The likeliest plan if none was exact, to be corrected by hand.

    Raises:
        ValueError: If one of ``plan`` and ``error`` is given without the other.
    """

    transformer: str
    plan: Plan | None = None
    blocks: CachedBlocks | None = None
    error: float | None = None
    blocks_error: float | None = None
    reasons: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    guess: Plan | None = None

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.error is None):
            raise ValueError("a plan and its error were not given together; expected both, or none.")

    def adapter(self) -> Adapter:
        """Return the proposal as an adapter, as for ``parallelize_pipe``.

        Raise ``ValueError`` if no plan was exact.
        """
        if self.plan is None:
            raise ValueError(f"no plan was found for {self.transformer}: {' '.join(self.questions)}")
        return Adapter(self.transformer, self.transformer, self.plan, blocks=self.blocks)

    def source(self) -> str:
        """Return the source of a module for adapters/models/ that defines the adapter.

        Raise as :meth:`adapter`.
        """
        return source_of(self.adapter())

    def __str__(self) -> str:
        lines = [
            f"{self.transformer}: " + ("no plan found" if self.plan is None else f"exact to {self.error:.1e}")
        ]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"? {question}" for question in self.questions]
        if self.plan is not None:
            return "\n".join([*lines, "", self.source()])
        if self.guess is not None:
            lines += [
                "",
                "The likeliest guess:",
                source_of(Adapter(self.transformer, self.transformer, self.guess)),
            ]
        return "\n".join(lines)


def source_of(adapter: Adapter) -> str:
    """Return the source of a module that defines a variable ``ADAPTER`` equal to ``adapter``.

    A function in it, such as ``modulated``, is imported from its module. One that cannot be imported, such as
    a lambda, is named in a TODO comment; the source raises ``NameError`` until it defines that name. The source
    has functions by their names alone, so two different ones, such as two lambdas, must not have one name.
    """
    prefix = "ADAPTER = "
    call = expression_of(adapter, used=len(prefix))
    names: dict[str, set[str]] = {}
    to_define: list[str] = []
    for part in _parts_of(adapter):
        if dataclasses.is_dataclass(part):
            names.setdefault(type(part).__module__, set()).add(type(part).__name__)
        elif isinstance(part, FunctionType) and _is_importable(part):
            names.setdefault(part.__module__, set()).add(part.__name__)
        elif isinstance(part, FunctionType):
            to_define.append(
                f"# TODO: define {_name_of(part)}, which is {part.__qualname__} of {part.__module__}."
            )
    imports = [
        _join_items(f"from {module} import ", sorted(names[module]), "", 0, parentheses=True)
        for module in sorted(names)
    ]
    return "\n".join([f'"""{adapter.transformer}."""', "", *imports, "", *to_define, f"{prefix}{call}", ""])


def expression_of(value: Any, indent: int = 0, *, used: int = 0) -> str:
    """Return ``value``, a part of an adapter, as a Python expression without defaults.

    Supported are dataclasses, mappings, tuples and lists of them, functions (by name), and strings, finite
    numbers, booleans and None.

    Args:
        value: The value.
        indent: Columns before the first line; later lines have as many spaces, or more.
        used: Further columns of the first line, of what stands before the expression and after it.

    Raises:
        TypeError: A part of ``value`` has another type.
    """
    inner = indent + 4
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [
            f"{name}={expression_of(entry, inner, used=len(name) + 2)}"
            for name, entry in _set_fields(value).items()
        ]
        return _join_items(f"{type(value).__name__}(", items, ")", indent + used, indent)
    if isinstance(value, Mapping):
        items = []
        for key, entry in value.items():
            name = expression_of(key)
            items.append(f"{name}: {expression_of(entry, inner, used=len(name) + 3)}")
        return _join_items("{", items, "}", indent + used, indent)
    if isinstance(value, tuple) and len(value) == 1:
        return f"({expression_of(value[0], indent, used=used + 3)},)"
    if isinstance(value, (tuple, list)):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        items = [expression_of(entry, inner, used=1) for entry in value]
        return _join_items(opening, items, closing, indent + used, indent)
    if isinstance(value, FunctionType):
        return _name_of(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise TypeError(f"{value!r} has no source that can be printed; write this part of the adapter by hand.")


def _set_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, by name."""
    set_fields = {}
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(value, field.name) != default:
            set_fields[field.name] = getattr(value, field.name)
    return set_fields


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield ``value``, and all that :func:`expression_of` writes inside of it."""
    yield value
    entries: Iterable[Any] = ()
    if dataclasses.is_dataclass(value):
        entries = _set_fields(value).values()
    elif isinstance(value, Mapping):
        entries = value.values()
    elif isinstance(value, (tuple, list)):
        entries = value
    for entry in entries:
        yield from _parts_of(entry)


def _is_importable(function: FunctionType) -> bool:
    """Whether ``from module import name`` gives ``function`` in another program."""
    module = sys.modules.get(function.__module__)
    return function.__module__ != "__main__" and getattr(module, function.__name__, None) is function


def _name_of(function: FunctionType) -> str:
    """Return the name of ``function`` in the source."""
    return "function" if function.__name__ == "<lambda>" else function.__name__


def _join_items(
    opening: str, items: list[str], closing: str, used: int, indent: int = 0, *, parentheses: bool = False
) -> str:
    """Return the expression on one line if it fits after ``used`` columns, else with one item per line.

    If ``parentheses``, only the second form is in parentheses.
    """
    line = opening + ", ".join(items) + closing
    if used + len(line) <= _WIDTH and "\n" not in line:
        return line
    if parentheses:
        opening, closing = f"{opening}(", f"){closing}"
    inner = " " * (indent + 4)
    return "\n".join([opening, *[f"{inner}{item}," for item in items], " " * indent + closing])
