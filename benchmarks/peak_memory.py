"""The most memory that activations take, as one rank sees them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Inside, the most bytes that were held at once by tensors that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in _flat([*args, *(kwargs or {}).values()])}
        out = func(*args, **(kwargs or {}))
        for x in _flat([out]):
            storage = x.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in given:
                self._known[storage._cdata] = weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def _flat(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
    return found
