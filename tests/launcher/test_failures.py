"""Ranks that raise, die or hang: what the caller gets, and how the next call goes on."""

import os
import pickle
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from para_core import RankDied, launch
from para_core.launcher import running_call
from para_core.launcher.display import Display
from para_core.launcher.messages import RandomState, RankError
from para_core.launcher.processes import RankGroup, _receive_messages, start_process
from para_core.launcher.wire import Body
from tests.launcher.loads import NotInProcess, alive, all_reduce_or_raise, pids


class OwnError(Exception):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return OwnError, (self.args[0], self.code)


class SilentError(Exception):
    def __str__(self):
        raise ValueError("no text")


class TwoArgumentsError(Exception):
    def __init__(self, first, *, second, lock=None):
        super().__init__(f"{first} and {second}")
        self.second, self.lock = second, lock


def test_exceptions_of_all_ranks_arrive_with_their_types_and_tracebacks(steps):
    def fail(pipe):
        torch.rand(3)
        raise TwoArgumentsError("one", second=2, lock=threading.Lock())

    def fail_with_what_only_ranks_have(pipe):
        raise OwnError("own", NotInProcess())

    before = pids(steps)
    for error, expected in (
        (ValueError("all"), ValueError),
        (OwnError("all", 3), OwnError),
        (SilentError("all"), SilentError),
        (SystemExit(4), RuntimeError),
        (KeyboardInterrupt("all"), KeyboardInterrupt),
    ):
        with pytest.raises(expected) as caught:
            steps.run(all_reduce_or_raise, None, error)
        assert getattr(caught.value, "code", 3) == 3
        assert "all_reduce_or_raise" in str(caught.value.__cause__)
    torch.manual_seed(3)
    with pytest.raises(TwoArgumentsError, match="one and 2") as caught:
        steps.run(fail)
    assert vars(caught.value) == {"second": 2}
    # Seeds go on as they do after an exception in one process.
    assert torch.equal(torch.rand(1), torch.rand(4, generator=torch.Generator().manual_seed(3))[3:])
    for answer, message in (
        (lambda pipe: NotInProcess(), "answer of rank 0 cannot be loaded"),
        (fail_with_what_only_ranks_have, "OwnError: own"),
    ):
        with pytest.raises(RuntimeError, match=message):
            steps.run(answer)
    assert pids(steps) == before


def test_exception_of_one_rank_frees_the_others(monkeypatch, steps, capsys):
    monkeypatch.setattr(running_call, "_GRACE", 1.0)
    before = pids(steps)
    steps.note("kept?")
    with pytest.raises(ValueError, match="alone") as caught:
        steps.run(all_reduce_or_raise, 1, ValueError("alone"))
    assert "Only rank 1" in str(caught.value.__notes__)
    assert alive(before) == []
    capsys.readouterr()
    assert steps.run(lambda pipe: pipe.notes) == []
    assert "changes that run() and methods made to the pipeline are lost" in capsys.readouterr().err
    assert set(pids(steps)).isdisjoint(before)


def seed_of_cuda(pipe, *unused):
    """Return the seed of CUDA's default generator on a rank, also if CUDA is not initialized there."""
    from para_core.torch_internals import queued_cuda_seed

    queued = queued_cuda_seed()
    return torch.cuda.initial_seed() if queued is None else queued[1]


def test_ranks_have_the_seed_of_cuda_after_a_call_that_was_not_sent_and_a_restart(steps):
    torch.manual_seed(11)
    with pytest.raises(TypeError, match="cannot be sent"):
        steps.run(seed_of_cuda, threading.Lock())
    assert steps.run(seed_of_cuda) == 11
    steps.restart()
    assert steps.run(seed_of_cuda) == 11


def test_killed_ranks_are_named_and_replaced(steps):
    os.kill(pids(steps)[1], signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(RankDied, match="rank 1 was ended by SIGKILL"):
        steps(1)
    before, begun = pids(steps), time.monotonic()
    threading.Timer(0.3, os.kill, [before[0], signal.SIGKILL]).start()
    with pytest.raises(RankDied, match="rank 0 was ended by SIGKILL") as caught:
        steps(10_000, seconds=0.02)
    assert time.monotonic() - begun < 5
    assert caught.value.rank == 0
    assert alive(before) == []
    assert steps(1) == {}


def test_real_time_signal_is_described_and_a_refused_group_leaves_no_rank_alive(monkeypatch):
    programs = ("import os; os.kill(os.getpid(), 40)", "import time; time.sleep(600)")
    members = [start_process(program, [], os.environ, shown=True) for program in programs]
    assert members[0].describe_end() == "was ended by signal 40."
    monkeypatch.setattr(os, "killpg", mock.Mock(side_effect=PermissionError))
    RankGroup(members, []).end(idle=False)
    assert members[1].describe_end() == "was ended by SIGKILL."


def test_ranks_are_ended_if_they_raise_differently(monkeypatch):
    # A module that cannot be imported here ends nothing.
    monkeypatch.setattr("importlib.import_module", mock.Mock(side_effect=OSError("no such library")))
    memory = torch.OutOfMemoryError  # Its text has the numbers of the rank's own device.
    for kind, texts, differ in ((ValueError, "aa", False), (ValueError, "ab", True), (memory, "ab", False)):
        group = mock.Mock(members=[0, 1], inbox=queue.SimpleQueue(), ended=False)
        for rank, text in enumerate(texts):
            failed = RankError(Body.of(kind(text)), f"{kind.__name__}: {text}", "", RandomState())
            group.inbox.put((("error", rank, 1), Body.of(failed)))
        with pytest.raises(kind, match="a"):
            running_call.RunningCall(group, 1, Display(False), 1.0).wait(["torch"])
        assert group.end.called == differ


def test_message_that_cannot_be_read_counts_as_the_end_of_its_rank():
    inbox, channel = queue.SimpleQueue(), mock.Mock(receive=mock.Mock(side_effect=pickle.UnpicklingError))
    with pytest.raises(pickle.UnpicklingError):
        _receive_messages(3, channel, inbox)
    assert inbox.get_nowait()[0] == ("died", 3)


def hang(pipe, rank=1):
    if torch.distributed.get_rank() == rank:
        time.sleep(600)
    torch.distributed.all_reduce(torch.ones(1))


def test_progress_is_waited_for_and_a_rank_that_hangs_is_named(steps, monkeypatch):
    # The ranks import this module before they are watched, because an import makes no progress.
    assert steps.run(hang, None) is None
    monkeypatch.setattr(steps._state, "options", replace(steps._state.options, silence=2.0))
    assert steps(5, seconds=0.6) == {}
    assert steps(1, callback_on_step_end=lambda *args: time.sleep(2.5) or args[3]) == {}
    message = r"(?s)no rank made progress for 2 s: rank 1 hangs.*rank 1: .* in hang"
    with pytest.raises(RankDied, match=message) as caught:
        steps.run(hang)
    assert caught.value.rank == 1


def test_stopped_rank_is_named(steps, monkeypatch):
    os.kill(pids(steps)[1], signal.SIGSTOP)
    monkeypatch.setattr(steps._state, "options", replace(steps._state.options, silence=2.0))
    with pytest.raises(RankDied, match=r"(?s)rank 1 hangs.*rank 1: does not run Python code"):
        steps(10_000, seconds=0.02)


def test_restart_ends_a_running_call(steps):
    before = pids(steps)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(steps, 10_000, seconds=0.02)
        time.sleep(0.5)
        steps.restart()
        with pytest.raises(RankDied, match=r"close\(\) or restart\(\)"):
            call.result()
    assert alive(before) == []
    assert steps(1) == {}


def load_and_exit():
    if os.environ["RANK"] == "1":
        os.write(2, b"its last words\n")
        os._exit(7)
    return lambda: None


def test_end_while_loading_arrives():
    with pytest.raises(TypeError, match="load returned None"):
        launch(lambda: None, ranks=1, progress=False)
    with pytest.raises(RankDied, match=r"(?s)rank 1 ended with exit code 7\. Its last output.*its last words"):
        launch(load_and_exit, ranks=2, progress=False)
