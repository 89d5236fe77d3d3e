"""Ranks that are threads of this process and exchange tensors in memory: for trying a plan or a mode on one device.

A rank that fails releases the others, and ranks that wait for each other in different collectives are found at once. So
a wrong plan is an error here, where on real ranks it may be a hang or an abort.

Ranks take turns: one runs until it waits in a collective. That one of them compiles is a state of the process in torch
(since 2.13), and the others would take themselves to be traced.
"""

from __future__ import annotations

import contextvars
import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.distributed.mesh import SequenceMesh, mesh_of_groups
from para_core.instance_patching import original_class
from para_core.plans.plan import Plan
from para_core.plans.region import apply_plan
from para_core.torch_internals import register_group_name, tree_leaves, tree_map, unregister_group_name

_NAMES = itertools.count()


class RanksDiffer(RuntimeError):
    """Virtual ranks do not fit: one failed, or sends what another does not expect."""


class _Ranks:
    """State that all ranks of one run share: whose turn it is, how many still run, and how many wait in a
    collective.
    """

    def __init__(self, running: int) -> None:
        # Held by the rank that runs. Never acquired while ``changed`` is held.
        self.turn = threading.Lock()
        self.changed = threading.Condition()
        self.running = running
        self.waiting = 0
        self.failed = False

    def wait_in(self, meeting: _Meeting) -> bool:
        """Wait until ``meeting`` has left its generation. The caller holds ``changed``, and no longer has the turn.

        Returns:
            Whether all have met. If not, a rank failed, or every rank that runs is waiting.
        """
        generation = meeting.generation
        meeting.waiting += 1
        self.waiting += 1
        self._check()
        self.turn.release()
        self.changed.wait_for(lambda: self.failed or meeting.generation != generation)
        return meeting.generation != generation

    def leave(self, *, failed: bool) -> None:
        """Note that a rank has ended."""
        with self.changed:
            self.running -= 1
            self.failed = self.failed or failed
            self._check()
            self.changed.notify_all()

    def stop(self) -> None:
        """Release all ranks that wait."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def _check(self) -> None:
        if self.waiting and self.waiting == self.running:
            self.failed = True
            self.changed.notify_all()


class _Meeting:
    """The exchange through which the ranks of one group pass messages."""

    def __init__(self, size: int, ranks: _Ranks) -> None:
        self.sent: list[Any] = [None] * size
        self.generation = 0
        self.waiting = 0
        self._ranks = ranks

    def exchange(self, rank: int, sent: Any, receive: Callable[[list[Any]], None]) -> None:
        """Call ``receive(sent)`` once every rank has laid down its part; no rank continues before all have received."""
        self.sent[rank] = sent
        self._meet()
        receive(self.sent)
        self._meet()

    def _meet(self) -> None:
        ranks = self._ranks
        with ranks.changed:
            if self.waiting + 1 == len(self.sent):
                # The last one to arrive. Those that it releases count as running before they wake up.
                ranks.waiting -= self.waiting
                self.waiting = 0
                self.generation += 1
                ranks.changed.notify_all()
                return
            have_met = ranks.wait_in(self)
        ranks.turn.acquire()
        if not have_met:
            raise RanksDiffer("another virtual rank failed, or took part in another collective.")


class _Done:
    """A collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True


# For mypy: torch declares these methods with more ways to call them than are used here.
_ProcessGroup: Any = dist.ProcessGroup


class _LocalGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group of threads: the collectives of :mod:`para_core.distributed.collectives`, and no
    others.
    """

    def __init__(self, rank: int, meeting: _Meeting, device_type: str) -> None:
        super().__init__(rank, len(meeting.sent))
        self._rank, self._meeting = rank, meeting
        self._name = f"virtual ranks {next(_NAMES)}"
        # The CPU too: the small exchange of eager code then goes over this group, not over a gloo group beside it.
        self._devices = [torch.device(one) for one in dict.fromkeys(("cpu", device_type))]

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def size(self) -> int:
        return len(self._meeting.sent)

    def rank(self) -> int:
        return self._rank

    def alltoall_base(self, received: Tensor, x: Tensor, receive_sizes: Any, send_sizes: Any, *_: Any) -> _Done:
        even = [x.shape[0] // self.size()] * self.size()
        sends = x.split(list(send_sizes) or even)

        def receive(sent: list[Sequence[Tensor]]) -> None:
            parts = received.split(list(receive_sizes) or even)
            for part, of_rank in zip(parts, sent, strict=True):
                _copy(part, of_rank[self._rank])

        self._meeting.exchange(self._rank, sends, receive)
        return _Done()

    def all_gather_single(self, gathered: Tensor, x: Tensor, *_: Any) -> _Done:
        def receive(sent: list[Tensor]) -> None:
            for part, of_rank in zip(gathered.view(self.size(), -1), sent, strict=True):
                _copy(part, of_rank.reshape(-1))

        self._meeting.exchange(self._rank, x, receive)
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> _Done:
        root = options.rootRank

        def receive(sent: list[Tensor]) -> None:
            if self._rank != root:
                _copy(tensors[0], sent[root])

        self._meeting.exchange(self._rank, tensors[0], receive)
        return _Done()

    # torch 2.11 calls them by other names.
    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single


def _copy(received: Tensor, sent: Tensor) -> None:
    if received.shape != sent.shape or received.dtype != sent.dtype:
        raise RanksDiffer(
            f"a rank expects {list(received.shape)} {received.dtype}, and is sent {list(sent.shape)} {sent.dtype}."
        )
    received.copy_(sent)


class _VirtualMesh(SequenceMesh):
    """A mesh whose groups torch.distributed does not know, so that it cannot destroy them."""

    def check_alive(self) -> None:
        pass


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: its return value, or the exception that ended it."""

    output: Any = None
    error: Exception | None = None


def outcomes_on_virtual_ranks(
    run: Callable[[SequenceMesh], Any], *, ring: int = 1, ulysses: int = 1, device: torch.device
) -> list[Outcome]:
    """Call ``run(mesh)`` on each of ``ring × ulysses`` virtual ranks, without gradients, and return what became of
    each.

    The threads have the current device and stream, the autocast state and the context variables of the caller.
    """
    ranks = _Ranks(ring * ulysses)
    meshes, groups = _meshes(ring, ulysses, device.type, ranks)
    outcomes = [Outcome()] * len(meshes)
    inherited = _Inherited(device)

    def run_rank(rank: int) -> None:
        ranks.turn.acquire()
        try:
            with inherited.entered(), torch.no_grad():
                outcomes[rank] = Outcome(run(meshes[rank]))
        # A model may fail in any way on a part of its tokens.
        except Exception as error:
            outcomes[rank] = Outcome(error=error)
        finally:
            ranks.turn.release()
            ranks.leave(failed=outcomes[rank].error is not None)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run_rank, rank), daemon=True)
        for rank in range(len(meshes))
    ]
    with _registered(groups):
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            ranks.stop()
    return outcomes


def first_error(outcomes: Sequence[Outcome]) -> tuple[int, Exception] | None:
    """Return the first rank that failed by itself, and its error; a rank that merely waited for another only if there
    is no other.
    """
    errors = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    causes = [(rank, error) for rank, error in errors if not _merely_waited(error)]
    return next(iter([*causes, *errors]), None)


def _merely_waited(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RanksDiffer):
            return True
        error = error.__cause__
    return False


def run_on_virtual_ranks(
    module: nn.Module, plan: Plan, inputs: Mapping[str, Any], *, ring: int = 1, ulysses: int = 1
) -> list[Any]:
    """Return what ``module(**inputs)`` returns on each of ``ring × ulysses`` virtual ranks under ``plan``, without
    gradients.

    The module itself is not touched: each rank runs a copy that shares its weights.

    Raises:
        Exception: what the first rank raised that did not merely wait for another.
    """
    copies = [with_same_weights(module) for _ in range(ring * ulysses)]

    def run(mesh: SequenceMesh) -> Any:
        apply_plan(copies[mesh.rank], plan, mesh)
        return copies[mesh.rank](**fresh(inputs))

    outcomes = outcomes_on_virtual_ranks(run, ring=ring, ulysses=ulysses, device=device_of(module, inputs))
    failed = first_error(outcomes)
    if failed is not None:
        raise failed[1]
    return [outcome.output for outcome in outcomes]


def device_of(module: nn.Module, inputs: Any = ()) -> torch.device:
    """Return the device of the first tensor among the module's weights, its buffers and ``inputs``."""
    tensors = itertools.chain(module.parameters(), module.buffers(), tree_leaves(inputs))
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copy lists and dicts, but not their tensors, because some models empty the containers that they get."""
    copied: dict[str, Any] = tree_map(lambda x: x, dict(inputs))
    return copied


def with_same_weights(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that shares its parameters and has its own buffers, because models update some in a
    call.

    Raises:
        RuntimeError: the module cannot be copied.
    """
    try:
        return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    # Whatever an attribute of a model may raise.
    except Exception as error:
        raise RuntimeError(
            f"{original_class(module).__name__} cannot be copied for virtual ranks, because copy.deepcopy of it fails: "
            f"{type(error).__name__}: {error}"
        ) from error


def _meshes(ring: int, ulysses: int, device_type: str, ranks: _Ranks) -> tuple[list[SequenceMesh], list[_LocalGroup]]:
    """Return the mesh of each rank, and all its groups."""
    rings = [_Meeting(ring, ranks) for _ in range(ulysses)]
    ulysses_groups = [_Meeting(ulysses, ranks) for _ in range(ring)]
    meshes: list[SequenceMesh] = []
    groups: list[_LocalGroup] = []
    for rank in range(ring * ulysses):
        outer, inner = divmod(rank, ulysses)
        of_ring = _LocalGroup(outer, rings[inner], device_type)
        of_ulysses = _LocalGroup(inner, ulysses_groups[outer], device_type)
        mesh = mesh_of_groups(of_ring, of_ulysses, device_type)
        meshes.append(_VirtualMesh(**{field.name: getattr(mesh, field.name) for field in fields(mesh)}))
        groups += [of_ring, of_ulysses]
    return meshes, groups


@contextmanager
def _registered(groups: Sequence[_LocalGroup]) -> Iterator[None]:
    """Inside, functional collectives find ``groups`` by their names."""
    with ExitStack() as stack:
        for group in groups:
            register_group_name(group.group_name, group)
            stack.callback(unregister_group_name, group.group_name)
        yield


class _Inherited:
    """Return a context with torch's state of this thread that a new thread does not inherit: device, stream and
    autocast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        on_accelerator = accelerator is not None and accelerator.type == device.type
        self._stream = torch.accelerator.current_stream(device) if on_accelerator else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        with torch.autocast(self._device_type, self._dtype, enabled=self._autocast):
            yield
