"""Ranks that raise, die or hang: what the caller gets, and how the next call goes on."""

import os
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest

from para_core import RankDied, launch
from tests.launcher.loads import all_reduce_or_raise, load_steps
from tests.launcher.test_cancel import pids


@pytest.fixture
def pair():
    """Return a ``Steps`` on two ranks that this test may break."""
    with launch(load_steps, ranks=2, progress=False) as pipe:
        yield pipe


@pytest.fixture
def impatient():
    """Return a ``Steps`` on two ranks whose calls may be without progress for 3 s. Loading takes longer."""
    with launch(load_steps, ranks=2, progress=False) as pipe:
        pipe._state.options = replace(pipe._state.options, timeout=3.0)
        yield pipe


def alive(processes):
    return [pid for pid in processes if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


class OwnError(Exception):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return OwnError, (self.args[0], self.code)


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("all"), ValueError),
        (OwnError("all", 3), OwnError),
        (SystemExit(4), RuntimeError),
        (KeyboardInterrupt("all"), KeyboardInterrupt),
    ],
)
def test_exception_of_all_ranks_arrives_with_its_type_and_traceback(steps, error, expected):
    before = pids(steps)
    with pytest.raises(expected) as caught:
        steps.run(all_reduce_or_raise, None, error)
    assert getattr(caught.value, "code", 3) == 3
    assert "all_reduce_or_raise" in str(caught.value.__cause__)
    assert pids(steps) == before


def test_exception_that_cannot_be_loaded_arrives_as_runtime_error(steps):
    def fail(pipe):
        raise UnpicklableError("one", "two")

    with pytest.raises(RuntimeError, match="UnpicklableError: one and two"):
        steps.run(fail)


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_of_one_rank_frees_the_others(pair, failing):
    before = pids(pair)
    pair.note("kept?")
    with pytest.raises(ValueError, match="alone") as caught:
        pair.run(all_reduce_or_raise, failing, ValueError("alone"))
    assert f"Only rank {failing}" in str(caught.value.__notes__)
    assert alive(before) == []
    with pytest.warns(UserWarning, match="changes that run"):
        assert pair.run(lambda pipe: pipe.notes) == []
    assert set(pids(pair)).isdisjoint(before)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_within_a_second(pair, victim):
    before = pids(pair)
    killed = []

    def kill():
        killed.append(time.monotonic())
        os.kill(before[victim], signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    with pytest.raises(RankDied, match=f"rank {victim} was ended by SIGKILL") as caught:
        pair(10_000, seconds=0.02)
    assert time.monotonic() - killed[0] < 5
    assert caught.value.rank == victim
    assert alive(before) == []
    with pytest.warns(UserWarning):
        assert pair(1) == {}


def test_rank_that_dies_between_calls_is_replaced(pair):
    before = pids(pair)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
        pair(1)
    with pytest.warns(UserWarning):
        assert pair(1) == {}


def test_last_output_of_a_rank_is_shown():
    def load():
        import os
        import sys

        if os.environ["RANK"] == "1":
            sys.stderr.write("its last words\n")
            sys.stderr.flush()
            os._exit(7)
        return lambda: None

    with pytest.raises(RankDied, match=r"(?s)rank 1 ended with exit code 7\. Its last output.*its last words"):
        launch(load, ranks=2, progress=False)


def test_rank_that_hangs_is_named(impatient):
    def hang(pipe):
        import time

        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(
        RankDied, match=r"(?s)no rank made progress for 3 s: rank 1 hangs.*rank 1: .* in hang"
    ) as caught:
        impatient.run(hang)
    assert caught.value.rank == 1


def test_stopped_rank_is_named(impatient):
    stopped = pids(impatient)[1]
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RankDied, match=r"(?s)rank 1 hangs.*rank 1: does not run Python code"):
        impatient(10_000, seconds=0.02)


def test_long_call_that_makes_progress_is_not_ended(impatient):
    assert impatient(10, seconds=0.5) == {}


def test_callback_may_take_longer_than_the_timeout(impatient):
    def callback(pipe, step, timestep, tensors):
        time.sleep(4)
        return tensors

    assert impatient(1, seconds=0.2, after=0.2, callback_on_step_end=callback) == {}


def test_result_that_cannot_be_loaded_here_leaves_the_ranks(pair):
    def refuse_here(pipe):
        import os

        from tests.launcher.loads import NotInProcess

        return NotInProcess(os.environ["PARA_CORE_LAUNCHED_RANK"])

    before = pids(pair)
    with pytest.raises(RuntimeError, match="answer of rank 0 cannot be loaded"):
        pair.run(refuse_here)
    assert pids(pair) == before


def test_exception_while_loading_arrives():
    def load():
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        launch(load, ranks=2, progress=False)


def test_exception_of_one_rank_while_loading_arrives():
    def load():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise OSError("only the last")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(OSError, match="only the last"):
        launch(load, ranks=2, progress=False)


def test_load_without_a_pipeline_is_refused():
    with pytest.raises(TypeError, match="load returned None"):
        launch(lambda: None, ranks=1, progress=False)


def test_restart_ends_a_running_call(pair):
    before = pids(pair)
    raised = []

    def call():
        try:
            pair(10_000, seconds=0.02)
        except RankDied as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.5)
    pair.restart()
    thread.join()
    assert "close() or restart()" in raised[0]
    assert alive(before) == []
    assert pair(1) == {}
