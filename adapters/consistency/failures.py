"""Diagnosis of a time-out: which rank does not answer, and why.

The time-out of a collective does not say which rank is missing. So the ranks of a pipeline exchange once where they run
(:func:`places_of_all`). A rank that leaves a call with an exception writes the reason into torch's store
(:func:`leave_reason`). A rank that gives up waiting takes part in a roll call over the store (:func:`why_no_answer`),
which names the silent ranks; a rank on the same host looks up the state of their processes.

The store is reached over the network that may have failed, and its calls may then block for minutes. So they run in a
thread, which is abandoned after ``_PATIENCE`` seconds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from para_core.distributed.consistency import Unanswered, exchange
from para_core.distributed.mesh import GuidedMesh
from para_core.foreign_errors import is_lost_connection
from para_core.torch_internals import default_store

# Seconds to wait for other ranks. They give up at nearly the same time, because a rank that gives up closes its
# connections.
_PATIENCE = 4.0
_INTERVAL = 0.05
_REASON_CHARACTERS = 2000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Host and process of a rank. Two ranks can see each other's process if ``machine`` and ``processes`` are equal."""

    rank: int
    host: str
    pid: int
    machine: str
    processes: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def _own_place() -> Place:
    # Containers on one machine have separate network namespaces, and may or may not share the namespace of processes.
    machine = f"{_read('/proc/sys/kernel/random/boot_id')} {_namespace('net')}"
    return Place(
        dist.get_rank() if dist.is_initialized() else 0, socket.gethostname(), os.getpid(), machine, _namespace("pid")
    )


def places_of_all(mesh: GuidedMesh) -> list[Place]:
    """Return the places of all ranks of ``mesh``. A collective call of one exchange."""
    return [Place(**record) for record in exchange(asdict(_own_place()), mesh)]


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:  # not on Linux
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def leave_reason(token: str, reason: str) -> None:
    """Store the reason why this rank leaves the call ``token``. The first reason of all ranks counts."""
    _in_time(lambda store: store.compare_set(_key(token, "reason"), "", reason[:_REASON_CHARACTERS]), None)


def why_no_answer(token: str, places: Sequence[Place]) -> str:
    """Return sentences that say which of ``places`` missed a collective of the call ``token``, and why."""
    answer = _in_time(lambda store: _call_roll(store, token, places), None, seconds=_PATIENCE + 1.0)
    if answer is not None:
        return answer
    machine = _own_place().machine
    others = [place for place in places if place.machine != machine]
    return (
        f"torch's store on {os.environ.get('MASTER_ADDR', 'the host of rank 0')} does not answer either, so "
        f"{_cannot_be_reached(others)}, or that process has ended."
        if others
        else "torch's store does not answer either: the process that holds it has ended or is stopped."
    )


def _call_roll(store: Any, token: str, places: Sequence[Place]) -> str:
    """Sign in, and return what is known of the silent ranks after at most ``_PATIENCE`` seconds."""
    own = _own_place()
    store.set(_key(token, f"here/{own.rank}"), "")
    deadline = time.monotonic() + _PATIENCE
    while True:
        if store.check([_key(token, "reason")]):
            return f"{store.get(_key(token, 'reason')).decode()}."
        is_last = time.monotonic() > deadline
        silent = [place for place in places if not store.check([_key(token, f"here/{place.rank}")])]
        for place in silent:
            state = _state(place, own)
            # A running process may still sign in.
            if state is not None and (state != _RUNS or time.monotonic() > deadline - _PATIENCE / 2):
                store.set(_key(token, f"state/{place.rank}"), state)
        states = {place: _get(store, _key(token, f"state/{place.rank}")) for place in silent}
        gone = {place: state for place, state in states.items() if state in (_ENDED, _STOPPED)}
        if gone:
            return _describe(places, gone)  # The other silent ranks still wait for these.
        if not silent or all(states.values()) or is_last:
            return _describe(places, states)
        time.sleep(_INTERVAL)


_ENDED = "has ended without an exception (killed or crashed: see its log, and the kernel's log for a lack of memory)"
_STOPPED = "is stopped (SIGSTOP, or a debugger)"
_RUNS = (
    "runs, and did not reach the collective within the time-out: it computes, sleeps or waits elsewhere (py-spy dump "
    "shows where)"
)


def _state(place: Place, own: Place) -> str | None:
    """Return the state of the process at ``place``; None if this process cannot see it."""
    if (place.machine, place.processes) != (own.machine, own.processes) or not own.processes:
        return None
    # The state follows the process name in brackets, which may contain spaces.
    state = _read(f"/proc/{place.pid}/stat").rpartition(")")[2].split()[:1]
    if not state or state[0] in "ZX":
        return _ENDED
    return _STOPPED if state[0] in "Tt" else _RUNS


def _describe(places: Sequence[Place], states: Mapping[Place, str | None]) -> str:
    """Return sentences about the silent ranks in ``states``; a state is None if unknown."""
    if not states:
        return (
            "all ranks run, and an exchange did not end within the time-out: a link between them is slow or loses "
            "packets, or a rank was late. Set a larger timeout=."
        )
    texts = [f"rank {place.rank} {state}: {place}." for place, state in states.items() if state is not None]
    unknown = [place for place, state in states.items() if state is None]
    for machine in dict.fromkeys(place.machine for place in unknown):
        on_machine = [place for place in places if place.machine == machine]
        if all(place in unknown for place in on_machine):
            texts.append(f"no rank of one host answers, so {_cannot_be_reached(on_machine)}, or they have all ended.")
        else:
            texts.extend(f"rank {place.rank} did not answer: {place}." for place in unknown if place in on_machine)
    return " ".join(texts)


def _cannot_be_reached(places: Sequence[Place]) -> str:
    named = ", ".join(f"rank {place.rank} ({place})" for place in places)
    return f"its network link may be cut, or very slow: {named} cannot be reached from here"


def _get(store: Any, key: str) -> str | None:
    # store.get would wait for a missing key.
    return store.get(key).decode() if store.check([key]) else None


def _key(token: str, name: str) -> str:
    return f"para_core/call/{token}/{name}"


def _in_time(query: Callable[[Any], Result], default: Result, seconds: float = _PATIENCE) -> Result:
    """Return ``query(store)``; ``default`` if the store does not answer within ``seconds`` or is gone."""
    results: list[Result] = []

    def run() -> None:
        try:
            results.append(query(default_store()))
        except (RuntimeError, ValueError):  # the process that holds the store has ended
            return

    thread = threading.Thread(target=run, name="para_core: torch's store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


@contextmanager
def reasons_shared(token: str, places: Sequence[Place]) -> Iterator[None]:
    """Inside the block, tell other ranks the reason of an exception, and add their reason to a collective's time-out.

    This works on gloo. The time-out of NCCL ends the process and raises nothing here (docs/several_nodes.md).

    Raises:
        RuntimeError: If another rank stopped answering; the message says which, and why.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Unanswered) or is_lost_connection(error):
            raise RuntimeError(
                f"another rank stopped answering in the middle of this call: {why_no_answer(token, places)} This rank "
                "gave up waiting."
            ) from error
        if dist.is_initialized():  # A single process may have no group.
            leave_reason(token, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
        raise
