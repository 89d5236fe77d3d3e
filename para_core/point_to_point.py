"""Tensors on their way from one rank of a mesh dim to another, in eager code, while both go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.mesh import MeshDim, find_or_make_group

# From one index along the dim to another.
Edge = tuple[int, int]


class Arriving:
    """A tensor that another rank sends; :meth:`wait` gives it, again and again."""

    def __init__(self, links: Links, buffer: Tensor, work: dist.Work | None, device: torch.device) -> None:
        self._links, self._buffer, self._work, self._device = links, buffer, work, device

    def wait(self) -> Tensor:
        """
        Raises:
            RuntimeError: it did not come within the timeout of the group (gloo; NCCL ends the process), or its sender died.
        """
        if self._work is not None:
            start = time.perf_counter()
            self._links.wait(self._work)
            self._links.seconds_waited += time.perf_counter() - start
            self._work, self._buffer = None, self._buffer.to(self._device)
        return self._buffer


class Links:
    """Connections along ``edges`` among the ranks of ``dim`` (more than one); every one of these ranks makes them.

    What is sent along one edge arrives in the order in which it was sent. On NCCL each edge has a communicator, and so a stream,
    of its own: what waits for one neighbour would else hold up what another one needs.
    """

    def __init__(self, dim: MeshDim, edges: Iterable[Edge]) -> None:
        if dim.group is None:
            raise ValueError(f"mesh dim {dim.name!r} has one rank, and so nobody to send to.")
        self.dim, self._group = dim, dim.group
        self._ranks = dist.get_process_group_ranks(dim.group)
        self._nccl = _has_nccl(dim.group)
        # In one order on all ranks: a group is made by both of its ranks at once.
        self._groups = {edge: self._group_of(edge) for edge in sorted(set(edges)) if dim.index in edge}
        # What was sent and may not have left yet, with its number.
        self._leaving: deque[tuple[int, dist.Work, Tensor]] = deque()
        # Since they were made. On NCCL the host waits for nothing, and the seconds say nothing.
        self.sent = self.bytes_sent = 0
        self.seconds_waited = 0.0

    def _group_of(self, edge: Edge) -> ProcessGroup:
        if not self._nccl:
            return self._group
        ranks = [self._ranks[index] for index in edge]
        timeout = self._group._get_backend(self._group._device_types[0]).options._timeout
        return find_or_make_group(f"para_core: from rank {ranks[0]} to rank {ranks[1]}", ranks, timeout=timeout)

    @property
    def _timeout(self) -> timedelta | None:
        """Of a wait on the host: gloo knows no default for single sends. As it is now, for users change it."""
        if self._nccl:
            return None
        found: timedelta = self._group._get_backend(torch.device("cpu")).options._timeout
        return found

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send ``x``, which nobody changes until it has left, to index ``to``."""
        while self._leaving and self._leaving[0][1].is_completed():
            self._leaving.popleft()
        # Gloo sends from the host only.
        x = x.detach().contiguous() if self._nccl else x.detach().to("cpu").contiguous()
        work = dist.isend(x, self._ranks[to], group=self._groups[self.dim.index, to])
        if work is None:
            raise RuntimeError(f"this rank is not part of mesh dim {self.dim.name!r}.")
        self._leaving.append((self.sent, work, x))
        self.sent, self.bytes_sent = self.sent + 1, self.bytes_sent + x.numel() * x.element_size()

    def receive(self, like: Tensor, source: int) -> Arriving:
        """Begin to receive, from index ``source``, a tensor of the shape, dtype and device of ``like``."""
        device = like.device if self._nccl else torch.device("cpu")
        buffer = torch.empty(like.shape, dtype=like.dtype, device=device)
        work = dist.irecv(buffer, self._ranks[source], group=self._groups[source, self.dim.index])
        return Arriving(self, buffer, work, like.device)

    def drain(self, count: int | None = None) -> None:
        """Wait until the first ``count`` tensors that were ever sent have left; None: all. Not after an exception: the others may
        never take them."""
        while self._leaving and (count is None or self._leaving[0][0] < count):
            self.wait(self._leaving.popleft()[1])

    def wait(self, work: dist.Work) -> None:
        if self._timeout is None:
            work.wait()
        else:
            work.wait(self._timeout)

    def forget(self) -> None:
        """After an exception: what was sent is not waited for."""
        self._leaving.clear()

    def from_rank(self, x: Tensor, source: int) -> Tensor:
        """``x`` of index ``source`` on all ranks of the dim, which all give one of its form."""
        x = (
            x.detach().contiguous()
            if self.dim.index == source
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        )
        start = time.perf_counter()
        # Gloo and NCCL know no 8-bit floats.
        bits = x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x
        dist.broadcast(bits, group_src=source, group=self._group)
        if self.dim.index != source:
            self.seconds_waited += time.perf_counter() - start
        return x


def _has_nccl(group: ProcessGroup) -> bool:
    """Whether tensors on a GPU travel over NCCL. What a group is called does not say: it may have a backend for each device."""
    devices = [device for device in group._device_types if device.type == "cuda"]
    return any(group._get_backend(device).name() == "nccl" for device in devices)
