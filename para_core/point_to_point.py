"""Tensors on their way from one rank of a mesh dim to another, in eager code, while both go on."""

from __future__ import annotations

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

    def __init__(self, buffer: Tensor, work: dist.Work | None, device: torch.device, timeout: timedelta | None) -> None:
        self._buffer, self._work, self._device, self._timeout = buffer, work, device, timeout

    def wait(self) -> Tensor:
        """
        Raises:
            RuntimeError: it did not come within the timeout of the group (gloo; NCCL ends the process), or its sender died.
        """
        if self._work is not None:
            _wait(self._work, self._timeout)
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
        self._on_gloo = "nccl" not in str(dist.get_backend(dim.group))
        # In one order on all ranks: a group is made by both of its ranks at once.
        self._groups = {edge: self._group_of(edge) for edge in sorted(set(edges)) if dim.index in edge}
        # What was sent and may not have left yet.
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def _group_of(self, edge: Edge) -> ProcessGroup:
        if self._on_gloo:
            return self._group
        ranks = [self._ranks[index] for index in edge]
        timeout = self._group._get_backend(self._group._device_types[0]).options._timeout
        return find_or_make_group(f"para_core: from rank {ranks[0]} to rank {ranks[1]}", ranks, timeout=timeout)

    @property
    def _timeout(self) -> timedelta | None:
        """Of a wait on the host: gloo knows no default for single sends. As it is now, for users change it."""
        if not self._on_gloo:
            return None
        found: timedelta = self._group._get_backend(torch.device("cpu")).options._timeout
        return found

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send ``x``, which nobody changes until it has left, to index ``to``."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        # Gloo sends from the host only.
        x = x.detach().to("cpu").contiguous() if self._on_gloo else x.detach().contiguous()
        work = dist.isend(x, self._ranks[to], group=self._groups[self.dim.index, to])
        if work is None:
            raise RuntimeError(f"this rank is not part of mesh dim {self.dim.name!r}.")
        self._leaving.append((work, x))

    def receive(self, like: Tensor, source: int) -> Arriving:
        """Begin to receive, from index ``source``, a tensor of the shape, dtype and device of ``like``."""
        device = torch.device("cpu") if self._on_gloo else like.device
        buffer = torch.empty(like.shape, dtype=like.dtype, device=device)
        work = dist.irecv(buffer, self._ranks[source], group=self._groups[source, self.dim.index])
        return Arriving(buffer, work, like.device, self._timeout)

    def drain(self) -> None:
        """Wait until all that was sent has left. Not after an exception: the others may never take it."""
        while self._leaving:
            work, _ = self._leaving.popleft()
            _wait(work, self._timeout)

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
        dist.broadcast(x, group_src=source, group=self._group)
        return x


def _wait(work: dist.Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
