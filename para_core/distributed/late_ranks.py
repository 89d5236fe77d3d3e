"""Say which ranks an exchange waits for, and which of them did not make the call if it times out.

A rank may be late for a good reason: it loads, compiles, or is slow. So nothing is raised before the group's
time-out, but after 10 s, and ever more seldom afterwards, one of the waiting ranks logs who is missing. A
rank that has waited for a second signs in at torch's store with the name of its call. The ranks of the group
that have not signed in with that name are late. An exchange that all ranks reach within a second does nothing
of this.

:func:`~para_core.distributed.agree.all_gather_bytes` calls it, so it serves every agreement, and no
collective of tensors. ``adapters/agree/failures.py``, which names the ranks that do not answer a collective
of tensors, asks the store by :func:`ask_store`, too. Tests: tests/distributed/test_late_ranks.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from para_core.distributed.mesh import MeshDim
from para_core.foreign_errors import is_out_of_patience
from para_core.torch_internals import default_store, group_timeout

logger = logging.getLogger(__name__)

# A rank that has waited for this time signs in. all_gather_bytes waits for it without this module's help.
PATIENCE = timedelta(seconds=1)
# Seconds until the missing ranks are logged for the first time. Each later wait is twice as long as the one
# before.
FIRST_LOOK = 10.0
# The last look is this many seconds before the time-out, when other ranks have not given up yet.
_BEFORE_TIMEOUT = 2.0
# Seconds to wait for an answer of the store.
_ANSWER = 2.0

Returned = TypeVar("Returned")


class Unanswered(RuntimeError):
    """The error that is raised if another rank did not take part in an exchange before the timeout, or has died."""


def ask_store(query: Callable[[Any], Returned], default: Returned, seconds: float) -> Returned:
    """Return ``query(store)``; ``default`` if torch's store does not answer within ``seconds`` or is gone."""
    results: list[Returned] = []

    def run() -> None:
        try:
            results.append(query(default_store()))
        except (RuntimeError, ValueError):
            # The process that holds the store has ended, so the default is returned.
            return

    thread = threading.Thread(target=run, name="para_core: torch's store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


def wait_for_late_ranks(
    work: Any, error: RuntimeError, dim: MeshDim, group: dist.ProcessGroup, call: str
) -> None:
    """Go on waiting for ``work``, an exchange over ``group``, the ranks of ``dim``, and log which ranks are
    late.

    Args:
        error: The error of the first wait, for :data:`PATIENCE`. If that is not why it ended, it is raised
            again. If the exchange has ended since, this function returns at once.
        call: The user's call that makes the exchange, as a noun such as "the FluxPipeline".

    Raises:
        Unanswered: The exchange timed out, and some ranks had not made the call.
        RuntimeError: It failed otherwise.
    """
    if not _is_running(work, error):
        return
    begun = time.monotonic() - PATIENCE.total_seconds()
    timeout = group_timeout(group, torch.device("cpu")).total_seconds()
    members, rank = dist.get_process_group_ranks(group), dist.get_rank()
    looks, late = _looks(timeout), dict[int, str]()
    ask_store(lambda store: store.set(_store_key(rank), call), None, _ANSWER)
    try:
        for seconds in looks:
            # torch waits without end if it is told to wait for 0 s.
            if _has_ended(work, timedelta(seconds=max(0.01, begun + seconds - time.monotonic()))):
                return
            late = _late_ranks(members, call)
            # What the last look finds is said by the error that follows.
            if late and seconds < looks[-1] and rank == min(set(members) - set(late)):
                logger.warning(
                    "rank %d has waited %.0f s in %s for %s. Every rank must make this call: it must not be under 'if "
                    "rank == 0'. If a rank still loads or compiles, the call goes on when it arrives. Otherwise it "
                    "fails after %.0f s.",
                    rank,
                    time.monotonic() - begun,
                    call,
                    ", ".join(late.values()),
                    timeout,
                )
        work.wait()
    except RuntimeError as failure:
        if not late or not is_out_of_patience(failure):
            raise
        raise Unanswered(
            f"{call} waited {timeout:g} s for {', '.join(late.values())}: of the {dim.size} ranks of mesh dim "
            f"{dim.name!r}, these did not make this call. Every rank must make it, not one under 'if rank == 0'; any "
            "rank may use the result. If a rank raised an exception or died before it, its log has the reason; if it "
            "was slow, set a larger timeout=."
        ) from failure
    finally:
        ask_store(lambda store: store.delete_key(_store_key(rank)), False, _ANSWER)


def _is_running(work: Any, error: RuntimeError) -> bool:
    """Whether ``work`` still runs after a wait for it that raised ``error``. Raise its error if it failed."""
    if not is_out_of_patience(error):
        raise error
    if not work.is_completed():
        return True
    # It has ended since the wait. If it failed, as by the timeout of its group, this raises.
    work.wait()
    return False


def _has_ended(work: Any, patience: timedelta) -> bool:
    """Wait up to ``patience``, and return whether ``work`` has ended. Raise its error if it failed."""
    try:
        work.wait(patience)
    except RuntimeError as error:
        return not _is_running(work, error)
    return True


def _looks(timeout: float) -> list[float]:
    """Return the seconds after the beginning of an exchange at which to look who is missing, ascending.

    >>> _looks(120.0)
    [10.0, 30.0, 70.0, 118.0]
    """
    last = max(timeout - _BEFORE_TIMEOUT, timeout / 2)
    seconds = [FIRST_LOOK]
    while seconds[-1] < last:
        seconds.append(2 * seconds[-1] + FIRST_LOOK)
    return [*[second for second in seconds if second < last], last]


def _store_key(rank: int) -> str:
    """Return the key of torch's store under which ``rank`` signs in."""
    return f"para_core/waiting/{rank}"


def _late_ranks(members: Sequence[int], call: str) -> dict[int, str]:
    """Return the other ``members`` that do not wait in ``call``, each with its name for a message, which says
    where it waits instead. There are none if torch's store does not answer.
    """
    calls = ask_store(lambda store: _calls_of(store, members), dict.fromkeys(members, call), _ANSWER)
    late = dict[int, str]()
    for rank in members:
        if rank != dist.get_rank() and calls.get(rank) != call:
            late[rank] = f"rank {rank}"
            if rank in calls:
                late[rank] += f" (which waits in {calls[rank]})"
    return late


def _calls_of(store: Any, ranks: Sequence[int]) -> dict[int, str]:
    """Return the calls in which ``ranks`` wait.
    A rank that does not wait, or only since a moment, is left out.
    """
    # Not by get(), which waits for a key that its rank deletes at this moment, and blocks the store of this
    # process meanwhile. compare_set() returns the expected value for a missing key, and sets nothing.
    absent = "no call"
    calls = {rank: store.compare_set(_store_key(rank), absent, absent).decode() for rank in ranks}
    return {rank: call for rank, call in calls.items() if call != absent}
