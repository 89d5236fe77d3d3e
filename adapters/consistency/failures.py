"""Diagnosis of a time-out: which rank does not answer, and why.

The time-out of a collective does not say which rank is missing. So the ranks of a pipeline exchange once where they run
(:func:`places_of_all`). A rank that leaves a call with an exception writes the reason into torch's store
(:func:`leave_reason`). A rank that gives up waiting signs in at the store and names the ranks that do not
(:func:`why_no_answer`).

The store is reached over the network that may have failed, and its calls may then block for minutes. So they run in a
thread, which is abandoned after ``_PATIENCE`` seconds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
# Process and host by global rank.
Places = Mapping[int, str]


def _own_rank() -> int:
    # A single process may have no group.
    return dist.get_rank() if dist.is_initialized() else 0


def places_of_all(mesh: GuidedMesh) -> Places:
    """Return the process and host of each rank of ``mesh``. A collective call of one exchange."""
    own = {"rank": _own_rank(), "place": f"process {os.getpid()} on host {socket.gethostname()}"}
    return {record["rank"]: record["place"] for record in exchange(own, mesh)}


def leave_reason(token: str, reason: str) -> None:
    """Store the reason why this rank leaves the call ``token``. The first reason of all ranks counts."""
    _in_time(lambda store: store.compare_set(_key(token, "reason"), "", reason[:_REASON_CHARACTERS]), None)


def why_no_answer(token: str, places: Places) -> str:
    """Return sentences that say which ranks of ``places`` missed a collective of the call ``token``, and why."""
    answer = _in_time(lambda store: _call_roll(store, token, places), None, seconds=_PATIENCE + 1.0)
    return answer or (
        f"torch's store on {os.environ.get('MASTER_ADDR', 'the host of rank 0')} does not answer either: its process "
        "has ended or is stopped, or the network link to it is cut or very slow."
    )


def _call_roll(store: Any, token: str, places: Places) -> str:
    """Sign in, wait up to ``_PATIENCE`` seconds for the others, and return the reason of a rank or the silent ranks."""
    store.set(_key(token, f"here/{_own_rank()}"), "")
    deadline = time.monotonic() + _PATIENCE
    while True:
        if store.check([_key(token, "reason")]):
            return f"{store.get(_key(token, 'reason')).decode()}."
        silent = [rank for rank in places if not store.check([_key(token, f"here/{rank}")])]
        if not silent:
            return (
                "all ranks run, and an exchange did not end within the time-out: a link between them is slow or loses "
                "packets, or a rank was late. Set a larger timeout=."
            )
        if time.monotonic() > deadline:
            named = ", ".join(f"rank {rank} ({places[rank]})" for rank in silent)
            return (
                f"no answer from {named}: killed or crashed (see its log, and the kernel's log for a lack of memory), "
                "stopped, busy elsewhere (py-spy dump shows where), or cut off from the network."
            )
        time.sleep(_INTERVAL)


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
def reasons_shared(token: str, places: Places) -> Iterator[None]:
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
        if dist.is_initialized():
            leave_reason(token, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
        raise
