"""Ranks that raise, die or hang: what the caller gets, and how the next call goes on."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

from para_core import RankDied, launch
from tests.launcher.loads import NotInProcess, alive, all_reduce_or_raise, load_steps, pids


@pytest.fixture
def impatient():
    """Return a ``Steps`` on two ranks whose calls may be without progress for 3 s. Loading takes longer."""
    with launch(load_steps, ranks=2, progress=False) as pipe:
        pipe._state.options = replace(pipe._state.options, silence=3.0)
        yield pipe


class OwnError(Exception):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return OwnError, (self.args[0], self.code)


class TwoArgumentsError(Exception):
    def __init__(self, first, *, second, lock=None):
        super().__init__(f"{first} and {second}")
        self.second, self.lock = second, lock


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


def test_exception_with_other_arguments_arrives_with_its_type(steps):
    def fail(pipe):
        import threading

        raise TwoArgumentsError("one", second=2, lock=threading.Lock())

    with pytest.raises(TwoArgumentsError, match="one and 2") as caught:
        steps.run(fail)
    assert vars(caught.value) == {"second": 2}


def test_seeds_continue_after_an_exception(steps):
    def draw_and_fail(pipe, generator):
        import torch

        torch.rand(3)
        torch.rand(2, generator=generator)
        raise ValueError("after draws")

    results = []
    for run in (steps.run, lambda function, *args: function(None, *args)):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        with pytest.raises(ValueError, match="after draws"):
            run(draw_and_fail, generator)
        results.append((torch.rand(1), torch.rand(1, generator=generator)))
    assert results[0] == results[1]


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_of_one_rank_frees_the_others(pair, failing, capsys):
    before = pids(pair)
    pair.note("kept?")
    with pytest.raises(ValueError, match="alone") as caught:
        pair.run(all_reduce_or_raise, failing, ValueError("alone"))
    assert f"Only rank {failing}" in str(caught.value.__notes__)
    assert alive(before) == []
    capsys.readouterr()
    assert pair.run(lambda pipe: pipe.notes) == []
    assert "changes that run() and methods made to the pipeline are lost" in capsys.readouterr().err
    assert set(pids(pair)).isdisjoint(before)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_and_replaced(pair, victim):
    before = pids(pair)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
        pair(1)
    assert pair(1) == {}
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


def test_progress_is_waited_for_and_a_rank_that_hangs_is_named(impatient):
    def callback(pipe, step, timestep, tensors):
        time.sleep(4)
        return tensors

    assert impatient(10, seconds=0.5) == {}
    assert impatient(1, seconds=0.2, after=0.2, callback_on_step_end=callback) == {}

    def hang(pipe):
        import time

        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    message = r"(?s)no rank made progress for 3 s: rank 1 hangs.*rank 1: .* in hang"
    with pytest.raises(RankDied, match=message) as caught:
        impatient.run(hang)
    assert caught.value.rank == 1


def test_stopped_rank_is_named(impatient):
    os.kill(pids(impatient)[1], signal.SIGSTOP)
    with pytest.raises(RankDied, match=r"(?s)rank 1 hangs.*rank 1: does not run Python code"):
        impatient(10_000, seconds=0.02)


def test_result_that_cannot_be_loaded_here_leaves_the_ranks(steps):
    before = pids(steps)
    with pytest.raises(RuntimeError, match="answer of rank 0 cannot be loaded"):
        steps.run(lambda pipe: NotInProcess(os.environ["PARA_CORE_LAUNCHED_RANK"]))
    assert pids(steps) == before


def load_nothing():
    return None


def load_missing():
    raise OSError("no such model")


def load_on_one():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise OSError("only the last")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (load_missing, OSError, "no such model"),
        (load_on_one, OSError, "only the last"),
        (load_nothing, TypeError, "load returned None"),
    ],
)
def test_exception_while_loading_arrives(load, error, message):
    with pytest.raises(error, match=message):
        launch(load, ranks=2, progress=False)


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
