"""Optional features of the adapters: one line each. To remove a feature, delete its files and its line."""

from __future__ import annotations

import importlib
from typing import Any

# Packages whose ``PROVIDES`` names the module of each function that other rooms may ask for. Imported at
# first use.
FEATURES: tuple[str, ...] = (
    "para_core.adapters.planner",
)  # fmt: skip


def feature(name: str) -> Any:
    """Return the function ``name`` of an optional feature; None if no feature provides it."""
    for package in FEATURES:
        modules = importlib.import_module(package).PROVIDES
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
    return None
