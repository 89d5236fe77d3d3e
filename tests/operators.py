"""The operators that run in a context, with their arguments and results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# The host waits for the results of these.
ASK_THE_HOST = {aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten.nonzero, aten.masked_select}


class Operators(TorchDispatchMode):
    """A recorder of each operator that runs: its overload, positional arguments and result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, out))
        return out
