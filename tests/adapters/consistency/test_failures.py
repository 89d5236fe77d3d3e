"""Which rank did not answer, and what became of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from para_core.adapters.consistency import failures
from para_core.adapters.consistency.failures import Place, leave_reason, why_no_answer

HERE = ("boot", "pids")


def places(*machines, pids=(0, 0, 0, 0)):
    """Of ranks 0, 1, …, each on one of these machines."""
    return [Place(rank, f"host-{name}", pids[rank], name, "pids") for rank, name in enumerate(machines)]


@contextmanager
def roll(of, present, patience=0.6):
    """The roll is called on rank 0 of ``of``; those in ``present`` have answered."""
    store = dist.HashStore()
    for rank in present:
        store.set(f"para_core/call/token/here/{rank}", "")
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(failures, "_own_place", return_value=of[0]),
        mock.patch.object(failures, "_PATIENCE", patience),
    ):
        yield store


@contextmanager
def process(*, stopped=False):
    """Of a process that sleeps, its id."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        if stopped:
            started.send_signal(signal.SIGSTOP)
            while (state := os.waitpid(started.pid, os.WUNTRACED | os.WNOHANG)) == (0, 0):
                time.sleep(0.01)
            assert os.WIFSTOPPED(state[1])
        yield started.pid
    finally:
        started.kill()
        started.wait()


def test_a_reason_that_was_left_is_what_is_told():
    ranks = places("a", "a")
    with roll(ranks, [0]):
        leave_reason("token", "rank 1 raised ValueError: no")
        leave_reason("token", "rank 0 raised RuntimeError: later")
        assert why_no_answer("token", ranks).startswith("rank 1 raised ValueError: no")


@pytest.mark.parametrize(("stopped", "state"), [(True, failures._STOPPED), (False, failures._RUNS)])
def test_a_silent_rank_on_this_host_is_looked_at(stopped, state):
    with process(stopped=stopped) as pid:
        ranks = places("a", "a", pids=(os.getpid(), pid))
        with roll(ranks, [0]):
            found = why_no_answer("token", ranks)
    assert found.startswith(f"rank 1 {state}")
    assert f"process {pid} on host host-a" in found


def test_ended_rank_is_named_and_waiting_ones_not():
    with process() as living:
        pass_away = subprocess.Popen([sys.executable, "-c", ""])
        pass_away.wait()
        ranks = places("a", "a", "a", pids=(os.getpid(), living, pass_away.pid))
        with roll(ranks, [0], patience=30.0):
            found = why_no_answer("token", ranks)
    assert found.startswith("rank 2 ") and "ended" in found
    assert "rank 1" not in found


def test_process_on_another_host_is_judged_there():
    with process() as pid:
        ranks = places("a", "b", "b", pids=(os.getpid(), pid, pid))
        with roll(ranks, [0, 1]):
            assert why_no_answer("token", ranks).startswith("rank 2 ")
        with roll(ranks, [0, 1]) as store:
            store.set("para_core/call/token/state/2", failures._STOPPED)
            assert why_no_answer("token", ranks).startswith("rank 2 is stopped")


def test_a_host_of_which_no_rank_answers_is_named():
    ranks = places("a", "a", "b", "b")
    with roll(ranks, [0, 1]):
        found = why_no_answer("token", ranks)
    assert "rank 2 (process 0 on host host-b), rank 3 (process 0 on host host-b)" in found


def test_where_all_ranks_answer_the_link_was_slow():
    ranks = places("a", "b")
    with roll(ranks, [0, 1]):
        assert why_no_answer("token", ranks).startswith("all ranks ")


def test_silent_store_is_not_waited_for():
    ranks = places("a", "b")
    release = threading.Event()
    begun = time.monotonic()
    with (
        roll(ranks, []),
        mock.patch.object(failures, "_call_roll", side_effect=lambda *_: release.wait(timedelta(60).total_seconds())),
    ):
        found = why_no_answer("token", ranks)
        release.set()
    assert time.monotonic() - begun < 30
    assert "store" in found
    assert "rank 1 (process 0 on host host-b)" in found


def test_processes_of_another_pid_namespace_are_not_looked_at():
    ranks = places("a", "a", pids=(os.getpid(), os.getpid()))
    ranks[1] = replace(ranks[1], processes="others")
    with roll(ranks, [0]):
        assert why_no_answer("token", ranks).startswith("rank 1 ")
