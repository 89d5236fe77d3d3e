"""Point-to-point transfers between the ranks of one mesh dim, in eager code, overlapping with computation."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.distributed.consistency import exchange
from para_core.distributed.mesh import TENSOR_DIM, GuidedMesh, MeshDim, dim_of_one, find_or_make_group, one_rank
from para_core.torch_internals import (
    abort_groups,
    backend_of,
    default_store,
    group_devices,
    group_timeout,
    is_registered,
    process_groups,
)

# From one index along the dim to another.
Edge = tuple[int, int]
# Seconds that a failed NCCL rank leaves for transfers that a peer still takes, before it ends the others.
_GRACE = 5.0


class IncomingTensor:
    """A tensor that another rank sends; :meth:`wait` returns it and can be called repeatedly."""

    def __init__(self, links: Links, transfer: _Transfer, device: torch.device) -> None:
        self._links, self._buffer, self._device = links, transfer.tensor, device
        self._transfer: _Transfer | None = transfer

    def wait(self) -> Tensor:
        """Return the tensor, after it has arrived.

        Raises:
            RuntimeError: It did not arrive within the timeout of the group (gloo; NCCL ends the process), or its sender
                died.
        """
        if self._transfer is not None:
            start = time.perf_counter()
            self._links.finish(self._transfer)
            self._links.seconds_waited += time.perf_counter() - start
            self._transfer, self._buffer = None, self._buffer.to(self._device)
        return self._buffer


def _new_number() -> int:
    """Return a number that no rank was given before, also not for other links over the same ranks."""
    if dist.get_backend() == "fake":
        return 1  # Its store cannot count, and nothing is sent.
    number: int = default_store().add("para_core: links", 1)
    return number


class _Transfer:
    """One send or receive that was started.

    Args:
        number: Its position among all transfers of the edge in this direction, from 0.
        tensor: Its memory. It must stay alive until the transfer has ended: gloo blocks the connection of two ranks for
            good if the buffer of a message in flight is gone (``Pair::write`` and ``Pair::prepareRead`` of its TCP
            transport).
    """

    __slots__ = ("edge", "number", "tensor", "work")

    def __init__(self, edge: Edge, number: int, work: dist.Work | None, tensor: Tensor) -> None:
        if work is None:
            raise RuntimeError(f"this rank does not belong to the group of edge {edge[0]} → {edge[1]}.")
        self.edge, self.number, self.work, self.tensor = edge, number, work, tensor


class Links:
    """Connections along ``edges`` among the ranks of ``dim``, which has more than one rank. Every rank of ``dim``
    creates them.

    Tensors that are sent along one edge arrive in order. On NCCL each edge has a communicator, and therefore a stream,
    of its own: otherwise a transfer that waits for one neighbour would hold up what another neighbour needs.

    **After a failure** some tensors were sent and never received, or the reverse. :meth:`mark_broken` notes it on this
    rank. :meth:`begin`, which every rank calls before the next generation, compares the number of transfers per edge
    over the CPU. If a rank has failed, or two numbers differ, all ranks continue with a tag (gloo) or with
    communicators (NCCL) that were never used before.
    """

    def __init__(self, dim: MeshDim, edges: Iterable[Edge]) -> None:
        if dim.group is None:
            raise ValueError(f"mesh dim {dim.name!r} has one rank, and so nobody to send to.")
        self.dim, self._group = dim, dim.group
        self._ranks = dist.get_process_group_ranks(dim.group)
        self._nccl_device = _nccl_device(dim.group)
        self._edges = sorted(set(edges))
        self._groups: dict[Edge, ProcessGroup] = {}
        self._tag = 0
        # The first `begin` makes tags and communicators as after a failure.
        self._broken = True
        # Numbers of transfers that were started, per edge, since the tag or the communicators are in use.
        self._started: Counter[Edge] = Counter()
        self._leaving: deque[_Transfer] = deque()
        self._arriving: dict[tuple[Edge, int], _Transfer] = {}
        # Totals since the links were created. On NCCL the host does not wait, and the seconds mean nothing.
        self.sent = self.bytes_sent = 0
        self.seconds_waited = 0.0
        self.begin()

    # -- before a generation, and after an exception

    def begin(self) -> None:
        """Make both ends of every edge agree on the next tensor. Every rank of the dim calls it before each generation:
        one exchange over the CPU.

        Raises:
            RuntimeError: A rank did not answer within the timeout.
        """
        mesh = GuidedMesh(dim_of_one("batch"), one_rank(self._group_device.type), dim_of_one(TENSOR_DIM), self.dim)
        started = [self._started[edge] for edge in self._edges]
        records = exchange({"broken": self._is_broken(), "started": started}, mesh)
        counts = {
            edge: (records[edge[0]]["started"][number], records[edge[1]]["started"][number])
            for number, edge in enumerate(self._edges)
        }
        if not any(record["broken"] for record in records) and all(
            sent == received for sent, received in counts.values()
        ):
            return
        self._end_transfers({edge: min(count) for edge, count in counts.items()})
        numbers = [self._group_number(edge) for edge in self._edges]
        new = _new_number() if self.dim.index == 0 else 0
        records = exchange({"numbers": numbers, "new": new}, mesh)
        self._tag = records[0]["new"]
        for number, edge in enumerate(self._edges):
            if self.dim.index in edge:
                first, second = (records[rank]["numbers"][number] for rank in edge)
                self._connect(edge, first if first == second and first > 0 else self._tag)
        self._started.clear()
        self._broken = False

    def mark_broken(self) -> None:
        """Note that a generation failed on this rank: what is in flight may never end. The next :meth:`begin` replaces
        the connections.
        """
        self._broken = True
        if self._nccl_device is None:
            return
        # On NCCL a transfer without a counterpart is a kernel that runs for ever: whatever waits for the device, as
        # cudaFree does, would hang. Transfers that do have one end by themselves, and a peer that did not fail may need
        # them.
        start = time.monotonic()
        transfers = [*self._leaving, *self._arriving.values()]
        while not all(transfer.work.is_completed() for transfer in transfers):
            if time.monotonic() - start > _GRACE:
                self._abort()
                break
            time.sleep(0.01)
        self._leaving.clear()
        self._arriving.clear()

    def _is_broken(self) -> bool:
        # Other links between the same ranks share the communicators, and may have ended them.
        return self._broken or not all(map(is_registered, self._groups.values()))

    def _end_transfers(self, matched: dict[Edge, int]) -> None:
        """Wait for the first ``matched`` transfers of each edge, which both ends have started, and drop the others."""
        if self._nccl_device is None:
            for transfer in [*self._leaving, *self._arriving.values()]:
                if transfer.number < matched[transfer.edge]:
                    self.wait(transfer.work)
        self._leaving.clear()
        self._arriving.clear()
        self._abort()

    # -- groups

    @property
    def _group_device(self) -> torch.device:
        return self._nccl_device or torch.device("cpu")

    def _description(self, edge: Edge) -> str:
        first, second = (self._ranks[index] for index in edge)
        return f"para_core: from rank {first} to rank {second}, "

    def _group_number(self, edge: Edge) -> int:
        """Return the number of the newest communicator of ``edge`` in this process, also of other links; 0 without
        one.
        """
        prefix = self._description(edge)
        names = [group.group_desc for group in process_groups()]
        return max((int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)), default=0)

    def _connect(self, edge: Edge, number: int) -> None:
        """Find or make the group of ``edge``; both of its ranks call this, in the order of the edges."""
        if self._nccl_device is None:
            self._groups[edge] = self._group
            return
        is_new = number != self._group_number(edge)
        timeout = group_timeout(self._group, self._group_device)
        ranks = [self._ranks[index] for index in edge]
        self._groups[edge] = find_or_make_group(f"{self._description(edge)}{number}", ranks, timeout=timeout)
        if is_new:
            # The first use makes the communicator, for which the host waits for the other rank. The order of the edges
            # is the same on all ranks, so no cycle of ranks can wait for each other here; in the middle of a generation
            # it could.
            x = torch.zeros(1, device=self._nccl_device)
            transfer = self._send if self.dim.index == edge[0] else self._receive
            transfer(edge, x).work.wait()
            x.item()

    def _abort(self) -> None:
        """End what runs on the communicators of the edges, and remove them. Of gloo nothing has to be ended."""
        groups = [group for group in self._groups.values() if group is not self._group and is_registered(group)]
        self._groups = {}
        abort_groups(groups)

    # -- transfers

    @property
    def _timeout(self) -> timedelta | None:
        """The timeout of a wait on the host, read at each wait because users change it. Gloo has no default for single
        sends.
        """
        if self._nccl_device is not None:
            return None
        timeout: timedelta = group_timeout(self._group, torch.device("cpu"))
        return timeout

    def _send(self, edge: Edge, x: Tensor) -> _Transfer:
        work = dist.isend(x, self._ranks[edge[1]], group=self._groups[edge], tag=self._tag)
        self._started[edge] += 1
        return _Transfer(edge, self._started[edge] - 1, work, x)

    def _receive(self, edge: Edge, buffer: Tensor) -> _Transfer:
        work = dist.irecv(buffer, self._ranks[edge[0]], group=self._groups[edge], tag=self._tag)
        self._started[edge] += 1
        return _Transfer(edge, self._started[edge] - 1, work, buffer)

    def send(self, x: Tensor, to: int) -> None:
        """Start to send ``x``, which nobody changes until it has left, to index ``to``."""
        while self._leaving and self._leaving[0].work.is_completed():
            self._leaving.popleft()
        # Gloo sends from the host only.
        x = x.detach().to(self._host_or_own(x)).contiguous()
        self._leaving.append(self._send((self.dim.index, to), x))
        self.sent, self.bytes_sent = self.sent + 1, self.bytes_sent + x.numel() * x.element_size()

    def receive(self, like: Tensor, source: int) -> IncomingTensor:
        """Start to receive, from index ``source``, a tensor of the shape, dtype and device of ``like``.

        On NCCL this is a kernel that runs until the tensor is here. Never start it before this rank has sent what that
        tensor depends on: the host may have to wait for the device in between (to load a kernel, or to allocate
        memory), and then both ranks wait for ever.
        """
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self._host_or_own(like))
        transfer = self._receive((source, self.dim.index), buffer)
        self._arriving[transfer.edge, transfer.number] = transfer
        return IncomingTensor(self, transfer, like.device)

    def _host_or_own(self, x: Tensor) -> torch.device:
        return torch.device("cpu") if self._nccl_device is None else x.device

    def drain(self, count: int | None = None) -> None:
        """Wait until the first ``count`` tensors ever sent have left, or all of them. Not after an exception: a peer
        may never take them.
        """
        first = self.sent - len(self._leaving)
        for _ in range(len(self._leaving) if count is None else min(count - first, len(self._leaving))):
            self.wait(self._leaving.popleft().work)

    def finish(self, transfer: _Transfer) -> None:
        """Wait for a tensor that this rank receives."""
        self.wait(transfer.work)
        self._arriving.pop((transfer.edge, transfer.number), None)

    def wait(self, work: dist.Work) -> None:
        if self._timeout is None:
            work.wait()
        else:
            work.wait(self._timeout)

    def from_rank(self, x: Tensor, source: int) -> Tensor:
        """Return ``x`` of index ``source`` on all ranks of the dim. Every rank gives a tensor of the same shape and
        dtype.
        """
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


def _nccl_device(group: ProcessGroup) -> torch.device | None:
    """Return the device whose tensors are sent over NCCL, or None. A group may have one backend per device, so its name
    does not tell.
    """
    devices = [device for device in group_devices(group) if device.type == "cuda"]
    return next((device for device in devices if backend_of(group, device).name() == "nccl"), None)
