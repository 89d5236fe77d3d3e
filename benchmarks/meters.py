"""Meters of one rank: the collectives and bytes that it sends, and the memory that its activations take."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim


class TrafficCounter(TorchDispatchMode):
    """Inside, counts the collectives that para_core starts in this process, and the bytes that they send to other ranks."""

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
    """Bytes that a collective sends to other ranks; None if ``func`` is none."""
    if func is torch.ops.c10d.alltoall_base_.default:
        _, x, group, _, sizes, *_ = args
        group = dist.ProcessGroup.unbox(group)
        sizes = sizes or [len(x) // group.size()] * group.size()
        return (sum(sizes) - sizes[group.rank()]) * x.element_size() * (x.numel() // max(1, len(x)))
    if func is torch.ops.para_core.all_to_all.default:
        x, sizes, _, name, *_ = args
        group = dist.distributed_c10d._resolve_process_group(name)
        return (sum(sizes) - sizes[group.rank()]) * x.element_size() * (x.numel() // max(1, len(x)))
    # Records by which ranks agree are bytes; what is gathered of an image's statistics is not.
    if func is torch.ops.c10d._allgather_base_.default and args[1].dtype != torch.uint8:
        return args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
    if func is torch.ops.para_core.all_gather.default:
        x, sizes, *_ = args
        return x.nbytes * (len(sizes) - 1)
    return None


@contextmanager
def counted_traffic() -> Iterator[TrafficCounter]:
    """A :class:`TrafficCounter` that sees the exchange of guidance branches, too."""
    traffic = TrafficCounter()

    def gather_branches(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: MeshDim) -> Tensor:
        # Often asked for inside a tensor's own dispatch, where a dispatch mode sees nothing.
        collectives, sent = traffic.collectives, traffic.bytes
        gathered = all_gather(x, sizes, tensor_dim, dim)
        traffic.collectives = collectives + 1
        traffic.bytes = sent + x.numel() * x.element_size() * (dim.size - 1)
        return gathered

    with traffic, mock.patch("para_core.cfg.guidance.all_gather", gather_branches):
        yield traffic


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
