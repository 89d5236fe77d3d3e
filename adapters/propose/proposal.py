"""The result of :func:`propose_plan`, and its Python source in the form of the modules in adapters/models/."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import para_core.plans.plan
from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Plan

# Columns of a line of source, as in the modules of adapters/models/.
_WIDTH = 118


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
    """

    transformer: str
    plan: Plan | None = None
    blocks: CachedBlocks | None = None
    error: float | None = None
    blocks_error: float | None = None
    reasons: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    guess: Plan | None = None

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
    """Return the source of a module that defines a variable ``ADAPTER`` equal to ``adapter``."""
    call = expression_of(adapter, 0)
    names = sorted(
        name for name in set(re.findall(r"\b([A-Z]\w+)\(", call)) if hasattr(para_core.plans.plan, name)
    )
    imports = ["from para_core.adapters.adapter import Adapter"]
    if adapter.blocks is not None:
        imports.append("from para_core.cache.blocks import BlockGroup, CachedBlocks")
    imports.append(f"from para_core.plans.plan import {', '.join(names)}")
    return "\n".join([f'"""{adapter.transformer}."""', "", *imports, "", f"ADAPTER = {call}", ""])


def expression_of(value: Any, indent: int = 0) -> str:
    """Return ``value``, a part of an adapter, as a Python expression without defaults, indented in later
    lines.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = []
        for field in dataclasses.fields(value):
            default = (
                field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            )
            if getattr(value, field.name) != default:
                items.append(f"{field.name}={expression_of(getattr(value, field.name), indent + 4)}")
        return _join_items(f"{type(value).__name__}(", items, ")", indent)
    if isinstance(value, Mapping):
        items = [
            f"{expression_of(key, 0)}: {expression_of(entry, indent + 4)}" for key, entry in value.items()
        ]
        return _join_items("{", items, "}", indent)
    if isinstance(value, tuple):
        if len(value) == 1:
            return f"({expression_of(value[0], indent)},)"
        return _join_items("(", [expression_of(entry, indent + 4) for entry in value], ")", indent)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _join_items(opening: str, items: list[str], closing: str, indent: int) -> str:
    """Return the expression on one line if it fits, else with one item per line."""
    line = opening + ", ".join(items) + closing
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    inner = " " * (indent + 4)
    return "\n".join([opening, *[f"{inner}{item}," for item in items], " " * indent + closing])
