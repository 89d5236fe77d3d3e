"""Calls that end early: cancelled from another thread or task, or by Ctrl-C."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from unittest import mock

import pytest

from para_core import Cancelled, launch
from para_core.fleet.engine import LaunchedRanks
from para_core.launcher.messages import Outcome, RandomState
from para_core.launcher.processes import RankGroup
from para_core.launcher.steps import Bar
from para_core.launcher.wire import Body
from tests.launcher.loads import load_steps, pids


def when_called(function, seconds=0.3):
    """Call ``function`` in another thread after some time."""
    threading.Timer(seconds, function).start()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"count": 1000, "seconds": 0.02}, Cancelled, r"cancelled after step \d+ of 1000"),
        ({"count": 1, "after": 0.6}, Cancelled, "after its last step"),
        ({"count": 5, "before": 0.6}, Cancelled, "after step 1 of 5"),
        ({"count": 1000, "seconds": 0.02}, KeyboardInterrupt, None),
        ({"count": 1, "after": 0.6}, KeyboardInterrupt, None),
    ],
)
def test_cancel_or_ctrl_c_ends_the_call_after_its_step_on_the_same_processes(steps, call, error, message):
    before, begun = pids(steps), time.monotonic()
    when_called(steps.cancel if error is Cancelled else interrupt)
    with pytest.raises(error, match=message):
        steps(**call)
    assert time.monotonic() - begun < 5
    assert not steps.cancel()
    assert steps(2) == {}
    assert pids(steps) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_cancel_inside_a_callback_ends_that_call(steps):
    with pytest.raises(Cancelled, match="after step 1 of"):
        steps(100, callback_on_step_end=lambda pipe, step, timestep, tensors: steps.cancel() and tensors)


def test_calls_of_threads_run_one_after_another(steps):
    seen = []

    def call(n):
        return steps(3, seconds=0.01, number=n, callback_on_step_end=lambda *args: seen.append(n) or args[3])["number"]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(4))) == [0, 1, 2, 3]
    assert [len(list(steps_of_call)) for _, steps_of_call in groupby(seen)] == [3] * 4


def test_awaited_calls_let_other_tasks_run_and_end_with_their_task(steps):
    async def run():
        calls = [steps.call(1000, seconds=0.02), steps.call(2, x=2), steps.call(1000, seconds=0.02)]
        first, second, waiting = (asyncio.create_task(call) for call in calls)
        await asyncio.sleep(0.3)
        for task in (waiting, first):
            task.cancel()
        for task in (first, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        return await second

    assert asyncio.run(run()) == {"x": 2}
    with pytest.raises(TypeError, match="not callable"):
        asyncio.run(steps.call(callback_on_step_end=3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(steps.call(1, callback_on_step_end=lambda *_: next(iter(()))), 20))
    assert steps(1) == {}


def test_second_ctrl_c_ends_the_ranks_as_a_line_says(steps, capsys):
    before = pids(steps)
    when_called(interrupt)
    when_called(interrupt, 0.6)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        steps(1, before=60.0)
    assert time.monotonic() - begun < 30
    assert "Ctrl-C again ends them" in capsys.readouterr().err
    assert steps(1) == {}
    assert set(pids(steps)).isdisjoint(before)


@pytest.mark.parametrize("kind", ["call", "load"])
def test_ctrl_c_while_a_job_is_sent_leaves_no_answer_to_the_next_call(steps, monkeypatch, kind):
    def send_and_interrupt(group, *head, body=None):
        send(group, *head, body=body)
        if head[0] == kind:
            monkeypatch.undo()
            interrupt()

    send = RankGroup.send
    monkeypatch.setattr(RankGroup, "send", send_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps(1, x=1) if kind == "call" else steps.restart()
    assert steps(1, x=2) == {"x": 2}
    steps._state.group.inbox.put((("result", 0, 0), Body.of(Outcome("of another call", RandomState()))))
    assert steps(1, x=3) == {"x": 3}


def test_a_bar_is_closed_once():
    connection = mock.Mock()
    with Bar(connection, None, 1, {"disable": None, "file": connection}) as bar:
        bar.update()
    bar.__del__()
    connection.open_bar.assert_called_once_with(1, {"disable": None})
    connection.report.assert_called_once()


def test_ranks_that_start_during_close_are_ended():
    with launch(load_steps, ranks=1, progress=False) as pipe:
        pipe._state.group.end(idle=False)
        ranks = LaunchedRanks(load_steps, 1, timeout=60.0)
        for own, call in ((pipe, lambda: pipe(1)), (ranks, ranks.start)):
            state, start = own._state, own._state.options.start
            state.options = replace(state.options, start=lambda own=own, start=start: (start(), own.close())[0])
            with pytest.raises(RuntimeError, match="closed"):
                call()
            assert state.group.ended
        group = ranks._state.group
        with pytest.raises(RuntimeError, match="closed"):
            ranks.start()
        assert ranks._state.group is group  # No others were started.
