"""Detect whether a model uses flex attention, by the names in the Python modules that define its classes."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from para_core.instance_patching import original_class

_NAMES = {"flex_attention", "create_block_mask", "create_mask", "BlockMask"}


def uses_flex_attention(module: nn.Module) -> bool:
    """Whether the code of ``module`` uses a name such as ``flex_attention`` or ``BlockMask``.

    The code consists of the Python modules that define the classes of all submodules and of their attention processors.
    Modules of torch are not searched.
    """
    parts = [(part, getattr(part, "processor", None)) for part in module.modules()]
    files = {original_class(owner).__module__ for pair in parts for owner in pair if owner is not None}
    return any(_names_flex_attention(sys.modules.get(name)) for name in files if not name.startswith("torch."))


def _names_flex_attention(file: Any) -> bool:
    values = list(vars(file).values()) if file is not None else []
    own = [value for value in values if getattr(value, "__module__", None) == file.__name__]
    functions = [value for value in own if not isinstance(value, type)]
    functions += [value for cls in own if isinstance(cls, type) for value in vars(cls).values()]
    return _NAMES & set(vars(file) if file is not None else ()) != set() or any(
        _NAMES & set(getattr(getattr(function, "__code__", None), "co_names", ())) for function in functions
    )
