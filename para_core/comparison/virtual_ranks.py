"""Virtual ranks: threads of this process that exchange tensors in memory, to test a plan or a mode on one
device.

If a rank fails, or if ranks wait for each other in different collectives, all waiting ranks raise at once. A
wrong plan therefore raises here, whereas real ranks may hang or abort.

Only one rank runs at a time, until it waits in a collective. This is needed since torch 2.13, where
``is_compiling()`` applies to the whole process: a rank that runs while another rank compiles would behave as
if it were traced.

``check_parallel``, ``propose_plan`` and :mod:`.runs` use them. Real ranks are started by
:mod:`para_core.launcher.launch`. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

import contextvars
import copy
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.dataclass_fields import leaves_of, map_leaves
from para_core.distributed.mesh import SequenceMesh, mesh_of_groups
from para_core.instance.private_class import original_class
from para_core.plans.apply import apply_plan
from para_core.plans.plan import Plan
from para_core.torch_internals import registered_group_names

_NAMES = itertools.count()


class RanksDiffer(RuntimeError):
    """An error raised on a virtual rank if the collectives of the ranks do not match, or if another rank
    failed while this rank waited.
    """


class _RankTurns:
    """The state that all ranks of one run share: whose turn it is, and how many ranks are running and
    waiting.
    """

    def __init__(self, running: int) -> None:
        # The rank that may run holds this lock. A thread never acquires ``turn`` while it holds ``changed``,
        # to avoid deadlocks.
        self.turn = threading.Lock()
        self.changed = threading.Condition()
        self.running = running
        self.waiting = 0
        self.failed = False

    def leave(self, *, failed: bool) -> None:
        """Record that the calling rank has ended.

        If it failed, or all remaining ranks wait, these then raise.
        """
        with self.changed:
            self.running -= 1
            self.failed = self.failed or failed
            self.check()
            self.changed.notify_all()

    def stop(self) -> None:
        """Release all waiting ranks, which then raise as if a rank had failed."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def check(self) -> None:
        """If all running ranks are waiting, so that no other rank can arrive, release them. The caller holds
        ``changed``.
        """
        if self.waiting and self.waiting == self.running:
            self.failed = True
            self.changed.notify_all()


class _Meeting:
    """A barrier at which the ranks of one process group exchange values."""

    def __init__(self, size: int, ranks: _RankTurns) -> None:
        self.sent: list[Any] = [None] * size
        self.generation = 0
        self.waiting = 0
        self._ranks = ranks

    def exchange(self, rank: int, collective: str, sent: Any, receive: Callable[[list[Any]], None]) -> None:
        """Send ``sent`` to all ranks of the group, call ``receive`` with the values of all ranks, and wait
        until all have received, since ``sent`` may be memory that its rank writes to afterwards. Collective.

        Raises:
            RanksDiffer: A rank failed, or the other ranks are in different collectives.
        """
        self.sent[rank] = (collective, sent)
        self._meet()
        names = [name for name, _ in self.sent]
        if len(set(names)) > 1:
            raise RanksDiffer(f"the virtual ranks of a group called {', '.join(names)}.")
        receive([sent_by_rank for _, sent_by_rank in self.sent])
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks have arrived. The caller must hold the turn, which others get meanwhile."""
        ranks = self._ranks
        with ranks.changed:
            generation = self.generation
            if self.waiting + 1 == len(self.sent):
                # This rank is the last to arrive and releases the others, so they no longer count as waiting.
                ranks.waiting -= self.waiting
                self.waiting = 0
                self.generation += 1
                ranks.changed.notify_all()
                return
            self.waiting += 1
            ranks.waiting += 1
            ranks.check()
            ranks.turn.release()
            ranks.changed.wait_for(lambda: ranks.failed or self.generation != generation)
            have_met = self.generation != generation
        ranks.turn.acquire()
        if not have_met:
            raise RanksDiffer("another virtual rank failed, or took part in another collective.")


class _Completed:
    """The work handle of a collective that has already completed."""

    def wait(self, *_: Any) -> bool:
        return True


# Use the type Any, because ProcessGroup declares overloads that _LocalGroup does not implement, which mypy
# rejects.
_ProcessGroup: Any = dist.ProcessGroup


class _LocalGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's process group over threads. It implements the methods that
    :mod:`para_core.distributed.collectives` calls, under the names by which torch and that module look them
    up.
    """

    def __init__(self, rank: int, meeting: _Meeting, device_type: str) -> None:
        super().__init__(rank, len(meeting.sent))
        self._meeting = meeting
        self._name = f"virtual ranks {next(_NAMES)}"
        # Include the CPU, so that the small exchanges of eager code use this group and not a separate gloo
        # group.
        self._devices = [torch.device(name) for name in dict.fromkeys(("cpu", device_type))]

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def alltoall_base(
        self, received: Tensor, x: Tensor, receive_sizes: Any, send_sizes: Any, *_: Any
    ) -> _Completed:
        """Send parts of ``x`` along dim 0, of ``send_sizes``, to the ranks, and write theirs to ``received``.
        Empty sizes mean equal parts. Collective.
        """
        even = [x.shape[0] // self.size()] * self.size()
        sends = x.split(list(send_sizes) or even)

        def receive(sent: list[Sequence[Tensor]]) -> None:
            parts = received.split(list(receive_sizes) or even)
            for part, parts_of_rank in zip(parts, sent, strict=True):
                _copy_received(part, parts_of_rank[self.rank()])

        self._meeting.exchange(self.rank(), "all_to_all", sends, receive)
        return _Completed()

    def all_gather_single(self, gathered: Tensor, x: Tensor, *_: Any) -> _Completed:
        """Write ``x`` of each rank, all of equal shapes, one after the other to ``gathered``. Collective."""

        def receive(sent: list[Tensor]) -> None:
            for part, x_of_rank in zip(gathered.view(self.size(), -1), sent, strict=True):
                _copy_received(part, x_of_rank.reshape(-1))

        self._meeting.exchange(self.rank(), "all_gather", x, receive)
        return _Completed()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> _Completed:
        """Write the first of the root rank's ``tensors`` to that of each rank; there are no others. Collective."""
        root = options.rootRank

        def receive(sent: list[Tensor]) -> None:
            if self.rank() != root:
                _copy_received(tensors[0], sent[root])

        self._meeting.exchange(self.rank(), "broadcast", tensors[0], receive)
        return _Completed()

    # Also define these two collectives under the names that torch 2.11 calls.
    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single


def _copy_received(received: Tensor, sent: Tensor) -> None:
    """Copy ``sent`` into ``received``. Raise :class:`RanksDiffer` if their shapes or dtypes differ."""
    if received.shape != sent.shape or received.dtype != sent.dtype:
        raise RanksDiffer(
            f"a rank expects {list(received.shape)} {received.dtype}, and is sent {list(sent.shape)} {sent.dtype}."
        )
    received.copy_(sent)


class _VirtualMesh(SequenceMesh):
    """A mesh whose groups are unknown to torch.distributed, so :meth:`check_alive` does nothing."""

    def check_alive(self) -> None:
        pass


@dataclass(frozen=True)
class RankOutcome:
    """The return value of a rank's function, or the exception that ended it."""

    output: Any = None
    error: Exception | None = None


def outcomes_on_virtual_ranks(
    run: Callable[[SequenceMesh], Any], *, ring: int = 1, ulysses: int = 1, device: torch.device
) -> list[RankOutcome]:
    """Call ``run(mesh)`` without gradients on each of ``ring × ulysses`` virtual ranks, and return the
    outcomes by rank.

    Exceptions of ``run`` are not raised but part of the outcomes. The threads inherit the current device and
    stream, the default device of new tensors, the autocast state for ``device`` and the context variables of
    the caller, but none of its modes. ``device`` is a CPU or an accelerator: autocast knows no meta device.
    """
    ranks = _RankTurns(ring * ulysses)
    rings = [_Meeting(ring, ranks) for _ in range(ulysses)]
    ulysses_groups = [_Meeting(ulysses, ranks) for _ in range(ring)]
    groups = [
        (
            _LocalGroup(outer, rings[inner], device.type),
            _LocalGroup(inner, ulysses_groups[outer], device.type),
        )
        for outer in range(ring)
        for inner in range(ulysses)
    ]
    meshes = [_VirtualMesh(**vars(mesh_of_groups(*pair, device.type))) for pair in groups]
    outcomes = [RankOutcome()] * len(meshes)
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_accelerator = accelerator is not None and accelerator.type == device.type
    stream = torch.accelerator.current_stream(device) if on_accelerator else None
    new_tensors = torch.get_default_device()

    def run_rank(rank: int) -> None:
        ranks.turn.acquire()
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            with ExitStack() as stack:
                stack.enter_context(torch.autocast(device.type, dtype, enabled=enabled))
                stack.enter_context(torch.no_grad())
                if new_tensors.type != "cpu":  # A mode: enter it only if the caller did.
                    stack.enter_context(new_tensors)
                outcomes[rank] = RankOutcome(run(meshes[rank]))
        # Catch any exception, because a model that gets only a part of its tokens may fail in any way.
        except Exception as error:
            outcomes[rank] = RankOutcome(error=error)
        # Such as SystemExit. It would end this thread, as if the rank had returned None.
        except BaseException as error:
            outcomes[rank] = RankOutcome(error=RuntimeError(f"a virtual rank raised {error!r}."))
        finally:
            ranks.turn.release()
            ranks.leave(failed=outcomes[rank].error is not None)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run_rank, rank), daemon=True)
        for rank in range(len(meshes))
    ]
    with registered_group_names({group.group_name: group for pair in groups for group in pair}):
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            ranks.stop()
    return outcomes


def first_error(outcomes: Sequence[RankOutcome]) -> tuple[int, Exception] | None:
    """Return the number and the error of the first rank that failed; None if no rank failed.

    A rank that failed only because another rank did (:class:`RanksDiffer`) is returned only if all failures
    are of this kind.
    """

    def merely_waited(error: BaseException | None) -> bool:
        return error is not None and (isinstance(error, RanksDiffer) or merely_waited(error.__cause__))

    errors = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    return min(errors, key=lambda item: merely_waited(item[1]), default=None)


def run_on_virtual_ranks(
    module: nn.Module, plan: Plan, inputs: Mapping[str, Any], *, ring: int = 1, ulysses: int = 1
) -> list[Any]:
    """Return the output of ``module(**inputs)`` under ``plan`` on each of ``ring × ulysses`` virtual ranks.

    Each rank runs a copy of ``module`` that shares its weights, without gradients. The module itself does not
    change.

    Raises:
        Exception: The error of the rank that :func:`first_error` selects, if a rank failed.
    """
    copies = [with_same_weights(module) for _ in range(ring * ulysses)]

    def run(mesh: SequenceMesh) -> Any:
        apply_plan(copies[mesh.rank], plan, mesh)
        return copies[mesh.rank](**copy_containers(inputs))

    outcomes = outcomes_on_virtual_ranks(run, ring=ring, ulysses=ulysses, device=device_of(module, inputs))
    failed = first_error(outcomes)
    if failed is not None:
        raise failed[1]
    return [outcome.output for outcome in outcomes]


def device_of(module: nn.Module, inputs: Any = ()) -> torch.device:
    """Return the device of the first tensor among weights, buffers and ``inputs``; the CPU if there is none."""
    tensors = itertools.chain(module.parameters(), module.buffers(), leaves_of(inputs))
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def copy_containers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` with lists, tuples, dicts and dataclasses copied but not tensors, because some models
    change the containers that they get.
    """
    copied: dict[str, Any] = map_leaves(lambda x: x, dict(inputs))
    return copied


def with_same_weights(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with the same parameter objects, but with copies of buffers, which a call
    may update.

    Raises:
        RuntimeError: The module cannot be copied.
    """
    try:
        return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    # Catch any exception, because copying the attributes of a model may run arbitrary code.
    except Exception as error:
        raise RuntimeError(
            f"{original_class(module).__name__} cannot be copied for virtual ranks, because copy.deepcopy of it fails: "
            f"{type(error).__name__}: {error}"
        ) from error
