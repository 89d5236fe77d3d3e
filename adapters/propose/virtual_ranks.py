"""Ranks that are threads of this process, which exchange tensors in memory: for trying a plan on one device.

A rank that fails sets the others free, so a wrong plan is an error here, where on real ranks it may be a hang or an abort.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from para_core.mesh import SequenceMesh, mesh_of_groups
from para_core.plans.plan import Plan
from para_core.plans.region import apply_plan

_TIMEOUT = 60.0  # seconds that a rank waits for the others
_NAMES = itertools.count()


class RanksDiffer(RuntimeError):
    """Virtual ranks do not fit: one failed, or sends what another does not expect."""


class _Meeting:
    """Where the ranks of one group lay down what they send."""

    def __init__(self, size: int) -> None:
        self.sent: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT)

    def exchange(self, rank: int, mine: Any, receive: Any) -> None:
        """``receive(sent)`` once every rank has laid down its part; nobody goes on before all have received."""
        self.sent[rank] = mine
        try:
            self.barrier.wait()
            receive(self.sent)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RanksDiffer("another virtual rank failed, or took part in another collective.") from None


class _Done:
    """A collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True


# For mypy: torch declares these methods with more ways to call them than are used here.
_ProcessGroup: Any = dist.ProcessGroup


class _LocalGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group of threads: the collectives of :mod:`para_core.collectives`, and no others."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, len(meeting.sent))
        self._place, self._meeting = rank, meeting
        self._name = f"virtual ranks {next(_NAMES)}"

    @property
    def group_name(self) -> Any:
        return self._name

    def size(self) -> int:
        return len(self._meeting.sent)

    def rank(self) -> int:
        return self._place

    def alltoall_base(self, received: Tensor, x: Tensor, receive_sizes: Any, send_sizes: Any, *_: Any) -> _Done:
        even = [x.shape[0] // self.size()] * self.size()
        sends = x.split(list(send_sizes) or even)

        def receive(sent: list[Sequence[Tensor]]) -> None:
            parts = received.split(list(receive_sizes) or even)
            for part, of_rank in zip(parts, sent, strict=True):
                _copy(part, of_rank[self._place])

        self._meeting.exchange(self._place, sends, receive)
        return _Done()

    def all_gather_single(self, gathered: Tensor, x: Tensor, *_: Any) -> _Done:
        def receive(sent: list[Tensor]) -> None:
            for part, of_rank in zip(gathered.view(self.size(), -1), sent, strict=True):
                _copy(part, of_rank.reshape(-1))

        self._meeting.exchange(self._place, x, receive)
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> _Done:
        root = options.rootRank

        def receive(sent: list[Tensor]) -> None:
            if self._place != root:
                _copy(tensors[0], sent[root])

        self._meeting.exchange(self._place, tensors[0], receive)
        return _Done()

    # torch 2.11 calls them by other names.
    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single


def _copy(mine: Tensor, sent: Tensor) -> None:
    if mine.shape != sent.shape or mine.dtype != sent.dtype:
        raise RanksDiffer(
            f"a rank expects {list(mine.shape)} {mine.dtype}, and is sent {list(sent.shape)} {sent.dtype}."
        )
    mine.copy_(sent)


def run_on_virtual_ranks(
    module: nn.Module, plan: Plan, inputs: Mapping[str, Any], *, ring: int = 1, ulysses: int = 1
) -> list[Any]:
    """What ``module(**inputs)`` returns on each of ``ring × ulysses`` virtual ranks under ``plan``, without gradients.

    The module itself is not touched: each rank runs a copy that shares its weights and buffers.

    Raises:
        Exception: what the first rank raised that did not merely wait for another.
    """
    meshes, groups = _meshes(ring, ulysses, next(module.parameters()).device.type)
    ranks = [with_same_weights(module) for _ in meshes]
    results: list[Any] = [None] * len(ranks)
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = ranks[rank](**fresh(inputs))
        except Exception as error:
            errors[rank] = error
            for group in groups:
                group._meeting.barrier.abort()

    names = [group.group_name for group in groups]
    try:
        for group in groups:
            torch._C._distributed_c10d._register_process_group(group.group_name, group)
        for rank, mesh in zip(ranks, meshes, strict=True):
            apply_plan(rank, plan, mesh)
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for name in names:
            torch._C._distributed_c10d._unregister_process_group(name)
    causes = [error for error in errors.values() if not isinstance(error, RanksDiffer)]
    for error in [*causes, *errors.values()]:
        raise error
    return results


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors in lists and dicts of their own: some models empty those that they are given."""
    copied: dict[str, Any] = tree_map(lambda x: x, dict(inputs))
    return copied


def _meshes(ring: int, ulysses: int, device_type: str) -> tuple[list[SequenceMesh], list[_LocalGroup]]:
    """The mesh of each rank, and all groups in it."""
    rings = [_Meeting(ring) for _ in range(ulysses)]
    ulysses_groups = [_Meeting(ulysses) for _ in range(ring)]
    meshes, groups = [], []
    for place in range(ring * ulysses):
        outer, inner = divmod(place, ulysses)
        of_ring, of_ulysses = _LocalGroup(outer, rings[inner]), _LocalGroup(inner, ulysses_groups[outer])
        meshes.append(mesh_of_groups(of_ring, of_ulysses, device_type))
        groups += [of_ring, of_ulysses]
    return meshes, groups


def with_same_weights(module: nn.Module) -> nn.Module:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
