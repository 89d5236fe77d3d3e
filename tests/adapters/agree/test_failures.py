"""Reports about ranks that did not answer, with the reason."""

import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from para_core.adapters.agree import failures
from para_core.adapters.agree.failures import leave_reason, why_no_answer

PLACES = {rank: f"process {rank}0 on host {host}" for rank, host in enumerate("aabb")}


@contextmanager
def roll(present, patience=0.3):
    """Call the roll on rank 0 of :data:`PLACES`, after the ranks in ``present`` have signed in."""
    store = dist.HashStore()
    for rank in present:
        store.set(f"para_core/call/token/here/{rank}", "")
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(failures, "_PATIENCE", patience),
    ):
        yield


def test_first_reason_of_a_rank_is_told_at_once():
    with roll([], patience=60.0):
        leave_reason("token", "rank 1 raised ValueError: no")
        leave_reason("token", "rank 0 raised RuntimeError: later")
        assert why_no_answer("token", PLACES).startswith("rank 1 raised ValueError: no")


@pytest.mark.parametrize("silent", [{1}, {2, 3}, set()])
def test_silent_ranks_are_named_or_the_link_was_slow(silent):
    with roll(PLACES.keys() - silent):
        answer = why_no_answer("token", PLACES)
    assert answer.startswith("all ranks ") == (not silent)
    for rank, process in PLACES.items():
        assert (f"rank {rank} ({process})" in answer) == (rank in silent)


@pytest.mark.slow
def test_silent_store_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "host-of-the-store")
    release = threading.Event()
    begun = time.monotonic()
    with roll([], patience=0.1), mock.patch.object(failures, "_call_roll", side_effect=lambda *_: release.wait(60.0)):
        answer = why_no_answer("token", PLACES)
        release.set()
    assert time.monotonic() - begun < 30
    assert "host-of-the-store" in answer
