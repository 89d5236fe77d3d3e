"""What a parallel autoencoder sends, and the most memory that its activations take, as one rank sees them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RowTraffic(TorchDispatchMode):
    """Inside, counts the collectives of this process that carry rows or statistics, and the bytes sent to other ranks.

    Records by which ranks agree, which do not depend on the picture, are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sent = _sent(func, args)
        if sent is not None:
            self.collectives += 1
            self.bytes += sent
        return func(*args, **(kwargs or {}))


def _sent(func: Any, args: Sequence[Any]) -> int | None:
    if func is torch.ops.c10d.alltoall_base_.default:
        _, x, group, _, sizes, *_ = args
        sizes = list(sizes)
        return int((sum(sizes) - sizes[dist.ProcessGroup.unbox(group).rank()]) * x.element_size())
    if func is torch.ops.c10d._allgather_base_.default and args[1].dtype != torch.uint8:
        return int(args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1))
    if func is torch.ops.para_core.all_gather.default:
        return int(args[0].nbytes * (len(args[1]) - 1))
    return None


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
