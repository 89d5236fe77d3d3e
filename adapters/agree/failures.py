"""Find out which rank does not answer, and why, when a collective times out.

The time-out of a collective does not say which rank is missing. So the ranks exchange their process ids and
hosts in advance (:func:`places_of_all`), and a rank that leaves a call with an exception writes the reason
into torch's store. A rank whose collective timed out signs in at the store and names the ranks that do not
(:func:`why_no_answer`). A rank that has finished the call does not sign in either, which would cost every call
a write: it is named as busy elsewhere, although it runs.

The store is reached over the same network, which may have failed: its calls run in a thread that is abandoned
after some seconds.

Calls of pipelines (``adapters/parallel/call.py``) and of autoencoders (``adapters/vae/run.py``) run inside
:func:`share_reasons`. Tests: tests/adapters/agree/test_arguments.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from para_core.distributed.agree import exchange
from para_core.distributed.late_ranks import Unanswered, ask_store
from para_core.distributed.mesh import GuidedMesh
from para_core.foreign_errors import is_lost_connection

# Seconds to wait for the other ranks to sign in. A few are enough: the first rank whose collective times out
# closes its connections, which ends the collectives of the other ranks too.
_SIGN_IN = 4.0
# Seconds to wait for the store when a reason is written.
_ANSWER = 4.0
# Seconds to wait for the store beyond _SIGN_IN, so that the roll can end by itself: its last look at the store
# begins before the deadline.
_LAST_LOOK = 1.0
# Seconds between two looks at the store.
_INTERVAL = 0.05
# Maximum length of a reason: enough for a message, too little for a large tensor that it prints.
_REASON_CHARACTERS = 2000

# Process id and host of each rank, as a text for messages, by global rank.
Places = Mapping[int, str]


def _global_rank() -> int:
    # Without torch.distributed there is a single process.
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def places_of_all(mesh: GuidedMesh) -> Places:
    """Return the process id and host of each rank of ``mesh``, by global rank.
    A collective call with one exchange.
    """
    process = {"rank": _global_rank(), "place": f"process {os.getpid()} on host {socket.gethostname()}"}
    return {record["rank"]: record["place"] for record in exchange(process, mesh)}


def leave_reason(token: str, reason: str) -> None:
    """Store why this rank leaves the call ``token``, unless a rank has stored a reason before.

    ``token`` is that of :func:`share_random_state`: random for each call, and equal on all ranks.
    """
    ask_store(
        lambda store: store.compare_set(_store_key(token, "reason"), "", reason[:_REASON_CHARACTERS]),
        None,
        _ANSWER,
    )


def why_no_answer(token: str, places: Places) -> str:
    """Return sentences that say which of the ranks in ``places`` do not answer in the call ``token``, and why."""
    answer = ask_store(lambda store: _call_roll(store, token, places), None, _SIGN_IN + _LAST_LOOK)
    return answer or (
        f"torch's store on {os.environ.get('MASTER_ADDR', 'the host of rank 0')} does not answer either: its process "
        "has ended or is stopped, or the network link to it is cut or very slow."
    )


def _call_roll(store: Any, token: str, places: Places) -> str:
    """Sign in at the store and wait up to ``_SIGN_IN`` seconds for the other ranks.

    Returns a text for the message: the reason that a rank has stored; or the ranks that did not sign in; or,
    if all of them did, that the exchange took longer than the time-out.
    """
    store.set(_store_key(token, f"here/{_global_rank()}"), "")
    deadline = time.monotonic() + _SIGN_IN
    while True:
        if store.check([_store_key(token, "reason")]):
            return f"{store.get(_store_key(token, 'reason')).decode().rstrip('.')}."
        silent = [rank for rank in places if not store.check([_store_key(token, f"here/{rank}")])]
        if not silent:
            return (
                "all ranks run, and an exchange did not end within the time-out: a link between them is slow or loses "
                "packets, or a rank was late. Set a larger timeout=."
            )
        if time.monotonic() > deadline:
            named = ", ".join(f"rank {rank} ({places[rank]})" for rank in silent)
            return (
                f"no answer from {named}: killed or crashed (see its log, and the kernel's log for a lack of memory), "
                "stopped, busy elsewhere or past this call (py-spy dump shows where), or cut off from the network."
            )
        time.sleep(_INTERVAL)


def _store_key(token: str, name: str) -> str:
    return f"para_core/call/{token}/{name}"


@contextmanager
def share_reasons(token: str, places: Places) -> Iterator[None]:
    """Report an exception of the ``with`` block to the other ranks, and explain a time-out by their reports.

    An exception on this rank is stored as its reason for leaving the call ``token``, and raised again. If a
    collective of this rank times out or loses its connection, ``RuntimeError`` is raised instead: it names
    the ranks of ``places`` that do not answer, and the reason. With NCCL a time-out ends the process
    (docs/several_nodes.md).
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
