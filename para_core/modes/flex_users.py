"""Find out whether the code of a model uses flex attention.

:mod:`.flex_attention` registers it: a plan intercepts such a model by a mode, and not at the dispatcher.
Tests: tests/plans/test_exactness.py, in which a model calls flex attention.
"""

from __future__ import annotations

import sys

from torch import nn

from para_core.instance.modules import submodules_of

# A model whose code has one of these names uses flex attention.
_NAMES = frozenset({"flex_attention", "create_block_mask", "create_mask", "BlockMask"})


def uses_flex_attention(module: nn.Module) -> bool:
    """Whether the code of ``module`` uses a name such as ``flex_attention`` or ``BlockMask``.

    Searches the Python modules, other than torch's, of the classes of all submodules and their attention
    processors.
    """
    # Private classes have the Python module of the original class.
    names: set[str] = set()
    for submodule in submodules_of(module):
        names.add(type(submodule).__module__)
        processor = getattr(submodule, "processor", None)
        if processor is not None:
            names.add(type(processor).__module__)
    return any(map(_mentions_flex_attention, [name for name in names if not name.startswith("torch.")]))


def _mentions_flex_attention(name: str) -> bool:
    """Whether the Python module ``name`` or a function in it uses one of ``_NAMES``."""
    python_module = sys.modules.get(name)
    if python_module is None:
        return False
    values = vars(python_module)
    if not _NAMES.isdisjoint(values):
        return True
    for value in values.values():
        if getattr(value, "__module__", None) != values["__name__"]:
            continue
        functions = [value]
        if isinstance(value, type):
            functions = list(vars(value).values())
        for function in functions:
            code = getattr(function, "__code__", None)
            if not _NAMES.isdisjoint(getattr(code, "co_names", ())):
                return True
    return False
