"""An adapter as source text, as it stands in adapters/models/."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from para_core.adapters.spec import Adapter

_WIDTH = 118
# Of a plan.
_WORDS = ("Attention", "Entries", "FirstTokens", "Gather", "LastTokens", "Plan", "Replicate", "Split")


def source_of(adapter: Adapter) -> str:
    """A module of adapters/models/ that describes ``adapter``."""
    call = _text(adapter, 0)
    names = [name for name in _WORDS if f"{name}(" in call]
    imports = ["from para_core.adapters.spec import Adapter"]
    if adapter.blocks is not None:
        imports.append("from para_core.cache.blocks import BlockGroup, CachedBlocks")
    imports.append(f"from para_core.plans.plan import {', '.join(names)}")
    return "\n".join([f'"""{adapter.transformer}."""', "", *imports, "", f"ADAPTER = {call}", ""])


def _text(value: Any, indent: int) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        given = {
            name: one for name, one in fields.items() if name not in _defaults(value) or one != _defaults(value)[name]
        }
        return _call(type(value).__name__, given, indent)
    if isinstance(value, Mapping):
        return _wrapped("{", [f"{_text(key, 0)}: " + _text(one, indent + 4) for key, one in value.items()], "}", indent)
    if isinstance(value, tuple):
        if len(value) == 1:
            return f"({_text(value[0], indent)},)"
        return _wrapped("(", [_text(one, indent + 4) for one in value], ")", indent)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _call(name: str, given: Mapping[str, Any], indent: int) -> str:
    return _wrapped(f"{name}(", [f"{key}={_text(one, indent + 4)}" for key, one in given.items()], ")", indent)


def _wrapped(opening: str, items: list[str], closing: str, indent: int) -> str:
    line = opening + ", ".join(items) + closing
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    inner = " " * (indent + 4)
    return "\n".join([opening, *[f"{inner}{item}," for item in items], " " * indent + closing])


def _defaults(value: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(value):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found
