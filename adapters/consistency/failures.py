"""Who does not answer, and why: what ranks that gave up waiting find out from torch's store and from their own host.

A collective's time-out says that some rank did not come, and not which. So the ranks of a pipeline tell each other once where they
run (:func:`places_of_all`). One that leaves a call with an exception leaves its reason (:func:`leave_reason`). One that gives up waiting
answers a roll call (:func:`why_no_answer`): who is silent is named, and a rank on the same host looks at what became of it.

The store is reached over the network that may have failed, and its own calls may then wait for minutes. So they run in a thread that nobody waits
for longer than ``_PATIENCE``.
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

# Seconds for a word from the others: those that wait for one who gave up are told at once, by its closed connections.
_PATIENCE = 4.0
_INTERVAL = 0.05
_REASON_CHARACTERS = 2000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Where a rank runs. ``machine`` and ``processes`` are equal where one rank can look at the process of the other."""

    rank: int
    host: str
    pid: int
    machine: str
    processes: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def _own_place() -> Place:
    """Of this process."""
    # Containers of one machine have network namespaces of their own, and see each other's processes or not.
    machine = f"{_read('/proc/sys/kernel/random/boot_id')} {_namespace('net')}"
    return Place(
        dist.get_rank() if dist.is_initialized() else 0, socket.gethostname(), os.getpid(), machine, _namespace("pid")
    )


def places_of_all(mesh: GuidedMesh) -> list[Place]:
    """Of all ranks of ``mesh``, which call this together: one exchange."""
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
    """Tell the other ranks of the call of this ``token`` why this one leaves it; the first reason counts."""
    _in_time(lambda store: store.compare_set(_key(token, "reason"), "", reason[:_REASON_CHARACTERS]), None)


def why_no_answer(token: str, places: Sequence[Place]) -> str:
    """Why one of the ranks at ``places`` did not come to a collective in the call of this ``token``, as far as it can be found out here."""
    found = _in_time(lambda store: _call_roll(store, token, places), None, seconds=_PATIENCE + 1.0)
    if found is not None:
        return found
    mine = _own_place()
    others = [place for place in places if place.machine != mine.machine]
    return (
        f"torch's store on {os.environ.get('MASTER_ADDR', 'the host of rank 0')} does not answer either, so {_cannot_be_reached(others)}, or it "
        "has ended."
        if others
        else "torch's store does not answer either: the process that holds it has ended, or does not run."
    )


def _call_roll(store: Any, token: str, places: Sequence[Place]) -> str:
    mine = _own_place()
    store.set(_key(token, f"here/{mine.rank}"), "")
    deadline = time.monotonic() + _PATIENCE
    while True:
        if store.check([_key(token, "reason")]):
            return f"{store.get(_key(token, 'reason')).decode()}."
        is_last = time.monotonic() > deadline
        silent = [place for place in places if not store.check([_key(token, f"here/{place.rank}")])]
        for place in silent:
            state = _state(place, mine)
            # One that lives may still come.
            if state is not None and (state != _LIVES or time.monotonic() > deadline - _PATIENCE / 2):
                store.set(_key(token, f"state/{place.rank}"), state)
        states = {place: _get(store, _key(token, f"state/{place.rank}")) for place in silent}
        gone = {place: state for place, state in states.items() if state in (_ENDED, _STOPPED)}
        if gone:
            return _describe(places, gone)  # the others wait for these, and have not noticed yet
        if not silent or all(states.values()) or is_last:
            return _describe(places, states)
        time.sleep(_INTERVAL)


_ENDED = "has ended without a word (killed, or crashed: see its log, and the kernel's for a lack of memory)"
_STOPPED = "is stopped (SIGSTOP, or a debugger)"
_LIVES = (
    "lives, and did not get here within the time-out: it computes, sleeps or waits elsewhere (py-spy dump shows where)"
)


def _state(place: Place, mine: Place) -> str | None:
    """What became of the process at ``place``; None if it cannot be seen from here."""
    if (place.machine, place.processes) != (mine.machine, mine.processes) or not mine.processes:
        return None
    # After the name in brackets, which may hold blanks.
    state = _read(f"/proc/{place.pid}/stat").rpartition(")")[2].split()[:1]
    if not state or state[0] in "ZX":
        return _ENDED
    return _STOPPED if state[0] in "Tt" else _LIVES


def _describe(places: Sequence[Place], states: Mapping[Place, str | None]) -> str:
    """``states``: of the silent ranks, what is known."""
    if not states:
        return (
            "all ranks live, and an exchange did not end within the time-out: a link between them is slow or loses packets, or a rank was "
            "late; timeout= may be larger."
        )
    texts = [f"rank {place.rank} {state}: {place}." for place, state in states.items() if state is not None]
    unknown = [place for place, state in states.items() if state is None]
    for machine in dict.fromkeys(place.machine for place in unknown):
        there = [place for place in places if place.machine == machine]
        if all(place in unknown for place in there):
            texts.append(f"no rank of one host answers, so {_cannot_be_reached(there)}, or they have all ended.")
        else:
            texts.extend(f"rank {place.rank} did not answer: {place}." for place in unknown if place in there)
    return " ".join(texts)


def _cannot_be_reached(places: Sequence[Place]) -> str:
    named = ", ".join(f"rank {place.rank} ({place})" for place in places)
    return f"its network link may be cut, or very slow: {named} cannot be reached from here"


def _get(store: Any, key: str) -> str | None:
    # A key that is not there would be waited for.
    return store.get(key).decode() if store.check([key]) else None


def _key(token: str, name: str) -> str:
    return f"para_core/call/{token}/{name}"


def _in_time(ask: Callable[[Any], Result], otherwise: Result, seconds: float = _PATIENCE) -> Result:
    """What ``ask`` finds in the store; ``otherwise`` if the store does not answer within ``seconds``, or is gone."""
    found: list[Result] = []

    def run() -> None:
        try:
            found.append(ask(default_store()))
        except (RuntimeError, ValueError):  # the process that holds the store has ended
            return

    thread = threading.Thread(target=run, name="para_core: torch's store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


@contextmanager
def reasons_shared(token: str, places: Sequence[Place]) -> Iterator[None]:
    """Inside, an exception leaves its reason for the other ranks, and a collective's time-out gives theirs.

    On gloo: NCCL's time-out ends the process and raises nothing here (docs/several_nodes.md).
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Unanswered) or is_lost_connection(error):
            raise RuntimeError(
                f"another rank stopped answering in the middle of this call: {why_no_answer(token, places)} This rank "
                "gave up waiting."
            ) from error
        if dist.is_initialized():  # one process alone may have no group
            leave_reason(token, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
        raise
