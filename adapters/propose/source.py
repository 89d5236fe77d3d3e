"""Write an adapter as Python source, in the form of the modules in adapters/models/."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import para_core.plans.plan
from para_core.adapters.adapter import Adapter

_WIDTH = 118


def source_of(adapter: Adapter) -> str:
    """Return the source of a module that defines a variable ``ADAPTER`` equal to ``adapter``."""
    call = _text(adapter, 0)
    names = sorted(name for name in set(re.findall(r"\b([A-Z]\w+)\(", call)) if hasattr(para_core.plans.plan, name))
    imports = ["from para_core.adapters.adapter import Adapter"]
    if adapter.blocks is not None:
        imports.append("from para_core.cache.blocks import BlockGroup, CachedBlocks")
    imports.append(f"from para_core.plans.plan import {', '.join(names)}")
    return "\n".join([f'"""{adapter.transformer}."""', "", *imports, "", f"ADAPTER = {call}", ""])


def _text(value: Any, indent: int) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = []
        for field in dataclasses.fields(value):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if getattr(value, field.name) != default:
                items.append(f"{field.name}={_text(getattr(value, field.name), indent + 4)}")
        return _wrapped(f"{type(value).__name__}(", items, ")", indent)
    if isinstance(value, Mapping):
        items = [f"{_text(key, 0)}: {_text(entry, indent + 4)}" for key, entry in value.items()]
        return _wrapped("{", items, "}", indent)
    if isinstance(value, tuple):
        if len(value) == 1:
            return f"({_text(value[0], indent)},)"
        return _wrapped("(", [_text(entry, indent + 4) for entry in value], ")", indent)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _wrapped(opening: str, items: list[str], closing: str, indent: int) -> str:
    line = opening + ", ".join(items) + closing
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    inner = " " * (indent + 4)
    return "\n".join([opening, *[f"{inner}{item}," for item in items], " " * indent + closing])
