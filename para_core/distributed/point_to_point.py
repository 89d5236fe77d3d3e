"""Point-to-point transfers between ranks of one mesh dim, in eager code, which overlap with computation.

Pipeline stages and PipeFusion use them. All other features use :mod:`para_core.distributed.collectives`.

``para_core/weights/stages.py`` holds the :class:`Links`. It calls :meth:`Links.begin` before each generation
of a pipeline, and before each call of a model outside of one. Who fails calls :meth:`Links.mark_broken`.
Tests: tests/weights/test_stages.py.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from para_core.distributed.agree import exchange
from para_core.distributed.collectives import NOT_SENT, view_to_send
from para_core.distributed.groups import find_or_make_group, groups_by_description, nccl_device
from para_core.distributed.mesh import GuidedMesh, MeshDim, one_guided_rank
from para_core.torch_internals import (
    abort_groups,
    default_store,
    group_timeout,
    is_registered,
)

# An edge is a directed connection between two ranks: (index of the sender, index of the receiver) along the
# mesh dim.
Edge = tuple[int, int]
# On NCCL, a rank that failed waits for this number of seconds for transfers that other ranks may still
# complete, before it aborts the communicators.
_GRACE = 5.0


class IncomingTensor:
    """A tensor that another rank is sending. :meth:`wait` returns the tensor, and may be called repeatedly."""

    def __init__(self, links: Links, transfer: _Transfer, device: torch.device) -> None:
        self._links, self._buffer, self._device = links, transfer.tensor, device
        self._transfer: _Transfer | None = transfer

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived, and return it.

        Raises:
            RuntimeError: The sender died, or gloo's timeout has passed. (After its own timeout NCCL ends the
                process.)
        """
        if self._transfer is not None:
            start = time.perf_counter()
            self._links.finish(self._transfer)
            self._links.seconds_waited += time.perf_counter() - start
            self._transfer, self._buffer = None, self._buffer.to(self._device)
        return self._buffer


class _Transfer(NamedTuple):
    """One send or receive that was started: the transfer with index ``number``, from 0, of its edge."""

    edge: Edge
    number: int
    work: dist.Work
    # The buffer must exist until the transfer has ended: if the buffer of a message in flight is freed, gloo
    # permanently blocks the connection of the two ranks (Pair::write and Pair::prepareRead of its TCP
    # transport). A message is in flight only after both ranks have started the transfer: until then gloo has
    # sent no more than a notice. So begin() waits for these transfers, and may drop those that one rank alone
    # has started, because no later transfer has their tag.
    tensor: Tensor


class Links:
    """Point-to-point connections between ranks of ``dim``, along ``edges`` (sender, receiver).

    Every rank of ``dim`` creates an object with the same edges, which is a collective call. Tensors that are
    sent along one edge arrive in order. On NCCL each edge has its own communicator, and therefore its own
    stream: on a common stream, a transfer that waits for one neighbour would delay transfers to another
    neighbour.

    **After a failure** there may be sends that were never received, and receives that were never sent.
    :meth:`mark_broken` records the failure on this rank. :meth:`begin`, which every rank calls before it
    sends again, compares the numbers of transfers of each edge over the CPU. If a rank has failed, or two
    numbers differ, all ranks continue with a tag (gloo) or with communicators (NCCL) that were never used
    before.

    Raises:
        ValueError: ``dim`` has one rank.
    """

    def __init__(self, dim: MeshDim, edges: Iterable[Edge]) -> None:
        if dim.group is None:
            raise ValueError(f"mesh dim {dim.name!r} has one rank, and so nobody to send to.")
        self.dim, self._group = dim, dim.group
        self._ranks = dist.get_process_group_ranks(dim.group)
        self._nccl_device = nccl_device(dim.group)
        self._device = self._nccl_device or torch.device("cpu")
        self._edges = sorted(set(edges))
        self._groups: dict[Edge, ProcessGroup] = {}
        self._tag = 0
        # Begin with broken connections, so that the first begin() creates tags and communicators.
        self._broken = True
        # Number of transfers started on each edge since its current tag or communicator was created.
        self._started: Counter[Edge] = Counter()
        # The transfers that may not have ended: sends in their order, and receives by edge and number.
        self._outgoing: deque[_Transfer] = deque()
        self._incoming: dict[tuple[Edge, int], _Transfer] = {}
        # Totals since this object was created, which PipeFusion reads for its report. It also passes an
        # earlier value of ``sent`` to drain(), so begin() does not reset it. On NCCL seconds_waited means
        # nothing, because the host does not wait.
        self.sent = self.bytes_sent = 0
        self.seconds_waited = 0.0
        self.begin()

    def begin(self) -> None:
        """Check that both ranks of every edge have started equally many transfers; otherwise replace the
        connections. Collective.

        Every rank of the mesh dim calls this method before each generation, or before each call of a model
        outside of one. It costs one exchange between CPUs, and a second one if the connections are replaced.

        Raises:
            RuntimeError: A rank did not answer within the timeout.
        """
        # Any mesh in which these ranks are the only dim with several ranks does for the exchange.
        mesh = replace(one_guided_rank(self._device.type), pipe=self.dim)
        # Other Links between the same ranks share the communicators, and may have destroyed these.
        broken = self._broken or not all(map(is_registered, self._groups.values()))
        started = {edge: self._started[edge] for edge in self._edges}
        records = exchange((broken, started), mesh)
        counts = {edge: tuple([records[rank][1][edge] for rank in edge]) for edge in self._edges}
        if not any(broken for broken, _ in records) and all(
            sent == received for sent, received in counts.values()
        ):
            return
        self._drop_transfers(counts)
        self._abort()
        self._reconnect(mesh)

    def _drop_transfers(self, counts: Mapping[Edge, tuple[int, ...]]) -> None:
        """Forget all transfers. With gloo, wait before for those that both ranks of their edge have started:
        ``counts`` are the numbers of transfers that these two have.
        """
        if self._nccl_device is None:
            for transfer in [*self._outgoing, *self._incoming.values()]:
                if transfer.number < min(counts[transfer.edge]):
                    self._wait(transfer.work)
        self._outgoing.clear()
        self._incoming.clear()

    def _reconnect(self, mesh: GuidedMesh) -> None:
        """Connect the ranks of all edges by a tag or communicators that were never used before. Collective.

        Communicators that another ``Links`` object has made since on both ranks of an edge are used, too.
        """
        numbers = {edge: self._group_number(edge) for edge in self._edges}
        new = 0
        if self.dim.index == 0:
            # This number was never used before in this job, on any rank. The fake backend, which sends
            # nothing, has no store that counts.
            new = 1 if dist.get_backend() == "fake" else default_store().add("para_core: links", 1)
        records = exchange({"numbers": numbers, "new": new}, mesh)
        self._tag = records[0]["new"]
        for edge in self._edges:
            if self.dim.index in edge:
                first, second = (records[rank]["numbers"][edge] for rank in edge)
                self._connect(edge, first if first == second and first > 0 else self._tag)
        self._started.clear()
        self._broken = False

    def mark_broken(self) -> None:
        """Record that a generation failed on this rank, so that transfers in flight may never end.

        The next :meth:`begin` replaces the connections. On NCCL this rank waits up to 5 s for transfers in
        flight, then aborts them.
        """
        self._broken = True
        if self._nccl_device is None:
            return
        # On NCCL a transfer without a counterpart on the other rank is a kernel that runs for ever, so that
        # anything that waits for the device (such as cudaFree) would hang. Do not abort at once, though:
        # transfers with a counterpart end by themselves, and a rank that did not fail may need them.
        start = time.monotonic()
        transfers = [*self._outgoing, *self._incoming.values()]
        while not all(transfer.work.is_completed() for transfer in transfers):
            if time.monotonic() - start > _GRACE:
                self._abort()
                break
            time.sleep(0.01)
        self._outgoing.clear()
        self._incoming.clear()

    def _description(self, edge: Edge) -> str:
        first, second = (self._ranks[index] for index in edge)
        return f"from rank {first} to rank {second}, "

    def _group_number(self, edge: Edge) -> int:
        """Return the number of the newest communicator of ``edge`` in this process, which another ``Links``
        object may have created; 0 if there is none.
        """
        prefix = self._description(edge)
        names = groups_by_description()
        return max((int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)), default=0)

    def _connect(self, edge: Edge, number: int) -> None:
        """Set the process group of ``edge``, whose communicator has this ``number``; create the group if
        needed.

        Both ranks of the edge call this method, in the sorted order of edges. gloo uses the group of the mesh
        dim.
        """
        if self._nccl_device is None:
            self._groups[edge] = self._group
            return
        # Equal on both ranks: _reconnect passes the newest number of both, or one that neither has used.
        is_new = number != self._group_number(edge)
        timeout = group_timeout(self._group, self._device)
        ranks = [self._ranks[index] for index in edge]
        self._groups[edge] = find_or_make_group(f"{self._description(edge)}{number}", ranks, timeout=timeout)
        if is_new:
            # Use the new group once, because the first use creates the communicator, for which the host waits
            # for the other rank. Here all ranks go through the edges in the same order, so no cycle of ranks
            # can wait for each other, as might happen in the middle of a generation.
            x = torch.zeros(1, device=self._nccl_device)
            self._start(edge, x).work.wait()
            x.item()

    def _abort(self) -> None:
        """Abort and remove the NCCL communicators of the edges, with all transfers on them; gloo has none."""
        groups = [
            group for group in self._groups.values() if group is not self._group and is_registered(group)
        ]
        self._groups = {}
        abort_groups(groups)

    def _start(self, edge: Edge, x: Tensor) -> _Transfer:
        """Start to send ``x`` if this rank is the sender of ``edge``, or to receive into it if it is the receiver."""
        sender, receiver = edge
        group = self._groups[edge]
        if self.dim.index == sender:
            work = dist.isend(x, self._ranks[receiver], group=group, tag=self._tag)
        else:
            work = dist.irecv(x, self._ranks[sender], group=group, tag=self._tag)
        if work is None:
            raise RuntimeError(f"this rank does not belong to the group of edge {edge[0]} → {edge[1]}.")
        self._started[edge] += 1
        return _Transfer(edge, self._started[edge] - 1, work, x)

    def send(self, x: Tensor, to: int) -> None:
        """Start to send ``x`` to the rank with index ``to``.
        Do not change ``x`` until :meth:`drain` has returned.

        ``x`` is a block's stream, so its dtype is one that NCCL sends: unlike :meth:`broadcast_from`, this
        does not convert those of ``NOT_SENT``.
        """
        while self._outgoing and self._outgoing[0].work.is_completed():
            self._outgoing.popleft()
        x = x.detach().to(self._device_for(x)).contiguous()
        self._outgoing.append(self._start((self.dim.index, to), x))
        self.sent, self.bytes_sent = self.sent + 1, self.bytes_sent + x.numel() * x.element_size()

    def receive(self, like: Tensor, source: int) -> IncomingTensor:
        """Start to receive a tensor from the rank with index ``source``; ``like`` gives its shape, dtype and
        device.

        On NCCL this starts a kernel that runs until the tensor has arrived. If the sender needs data from
        this rank first, send the data before calling this method. Otherwise the host may have to wait for the
        device before it can send (to load a kernel, or to allocate memory), and then both ranks wait for
        ever.
        """
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self._device_for(like))
        transfer = self._start((source, self.dim.index), buffer)
        self._incoming[transfer.edge, transfer.number] = transfer
        return IncomingTensor(self, transfer, like.device)

    def _device_for(self, x: Tensor) -> torch.device:
        """Return the device from which ``x`` is sent: the CPU for gloo, which can only send CPU tensors."""
        return torch.device("cpu") if self._nccl_device is None else x.device

    def drain(self, count: int | None = None) -> None:
        """Wait until the first ``count`` tensors that were ever sent have left this rank (all if ``count`` is
        None). On NCCL the current stream waits, not the host.

        Tensors that :meth:`begin` or :meth:`mark_broken` dropped count as sent, so a ``count`` from before is
        still valid, and does not wait for them. Do not call this method between a failure and the next
        :meth:`begin`, because the other ranks may never receive these tensors.
        """
        first = self.sent - len(self._outgoing)
        num_waited = len(self._outgoing)
        if count is not None:
            num_waited = min(count - first, num_waited)
        for _ in range(num_waited):
            self._wait(self._outgoing.popleft().work)

    def finish(self, transfer: _Transfer) -> None:
        """Wait until the tensor of a receiving ``transfer`` has arrived."""
        self._wait(transfer.work)
        self._incoming.pop((transfer.edge, transfer.number), None)

    def _wait(self, work: dist.Work) -> None:
        """Wait until ``work`` has ended, at most for the timeout of the group; on NCCL the current stream waits."""
        if self._nccl_device is not None:
            work.wait()  # The host does not wait on NCCL.
        else:
            # Read the timeout again because users may change it, and pass it because a send on gloo has no
            # default.
            work.wait(group_timeout(self._group, torch.device("cpu")))

    def broadcast_from(self, x: Tensor, source: int) -> Tensor:
        """Return the ``x`` of the rank with index ``source``. Collective over the mesh dim.

        Other ranks pass an ``x`` of the same shape, dtype and device type, whose values are not read.

        It uses the group of the mesh dim, which :meth:`begin` does not replace. If a rank fails before this
        call, the others wait for the timeout of the group. Nothing here prevents that: the caller
        (``weights/stages.py``) marks the links as broken on each rank that raises.

        Raises:
            RuntimeError: A rank did not call it within gloo's timeout. (After its own timeout NCCL ends the
                process.)
        """
        if self.dim.index == source:
            x = x.detach().contiguous()
        else:
            x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        start = time.perf_counter()
        sent = x
        if x.dtype in NOT_SENT:
            sent = view_to_send(x)
        dist.broadcast(sent, group_src=source, group=self._group)
        if self.dim.index != source:
            self.seconds_waited += time.perf_counter() - start
        return x
