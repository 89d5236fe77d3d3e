"""Calls that end early: cancelled from another thread or task, or by Ctrl-C."""

import asyncio
import os
import signal
import threading
import time

import pytest

from para_core import Cancelled
from tests.launcher.loads import alive, pids


def when_called(function, seconds=0.3):
    """Call ``function`` in another thread after some time."""
    timer = threading.Timer(seconds, function)
    timer.start()
    return timer


def test_cancel_ends_the_call_after_its_step_on_the_same_processes(steps):
    before = pids(steps)
    ended = []

    def cancel():
        assert steps.cancel()
        ended.append(time.monotonic())

    when_called(cancel)
    with pytest.raises(Cancelled, match=r"cancelled after step \d+ of 1000"):
        steps(1000, seconds=0.02)
    assert time.monotonic() - ended[0] < 5
    assert steps(2) == {}
    assert pids(steps) == before


def test_cancel_without_a_call_does_nothing(steps):
    assert not steps.cancel()
    assert steps(1) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"count": 1, "after": 1.0}, "after its last step"),
        ({"count": 5, "before": 1.0}, "after step 1 of 5"),
    ],
)
def test_cancel_outside_of_steps_raises_too(steps, call, message):
    when_called(steps.cancel)
    with pytest.raises(Cancelled, match=message):
        steps(**call)
    assert steps(1) == {}


def test_cancel_inside_a_callback_ends_that_call(steps):
    with pytest.raises(Cancelled, match="after step 1 of"):
        steps(100, callback_on_step_end=lambda pipe, step, timestep, tensors: steps.cancel() and tensors)


def test_calls_of_threads_run_one_after_another(steps):
    running, most, results = [], [], []

    def callback(pipe, step, timestep, tensors):
        if step == 0:
            running.append(threading.get_ident())
        most.append(len(set(running)))
        if step == 2:
            running.remove(threading.get_ident())
        return tensors

    def call(number):
        results.append(steps(3, seconds=0.01, callback_on_step_end=callback, number=number)["number"])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert sorted(results) == [0, 1, 2, 3]


def test_awaited_calls_let_other_tasks_run(steps):
    async def count():
        ticks = 0
        task = asyncio.create_task(steps.call(10, seconds=0.02, x=1))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await task, ticks

    result, ticks = asyncio.run(count())
    assert result == {"x": 1}
    assert ticks > 5
    with pytest.raises(TypeError, match="not callable"):
        asyncio.run(steps.call(callback_on_step_end=3))


def test_end_of_an_awaiting_task_cancels_only_its_call(steps):
    async def run():
        first = asyncio.create_task(steps.call(1000, seconds=0.02))
        second = asyncio.create_task(steps.call(2, x=2))
        waiting = asyncio.create_task(steps.call(1000, seconds=0.02))
        await asyncio.sleep(0.3)
        waiting.cancel()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await second

    assert asyncio.run(run()) == {"x": 2}
    assert steps(1) == {}


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("call", [{"count": 1000, "seconds": 0.02}, {"count": 1, "after": 1.0}])
def test_ctrl_c_ends_the_call_after_its_step(steps, call):
    before = pids(steps)
    when_called(interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps(**call)
    assert steps(1) == {}
    assert pids(steps) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_ends_the_ranks(steps):
    before = pids(steps)
    when_called(interrupt)
    when_called(interrupt, 0.6)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        steps(1, before=60.0)
    assert time.monotonic() - begun < 30
    assert steps(1) == {}
    assert set(pids(steps)).isdisjoint(before)


MANY = """
import os, signal, sys, threading, time
from para_core import launch
from tests.launcher.loads import Steps, load_steps

pipe = launch(load_steps, ranks=2, progress=False)
signal.signal(signal.SIGINT, signal.default_int_handler)
ranks = {*pipe.run(Steps.process, all_ranks=True)}
for index in range(5):
    threading.Timer(0.3 + float(sys.argv[1]) * index, os.kill, (os.getpid(), signal.SIGINT)).start()
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        pipe(1, before=2.0)
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)
pipe(1)
ranks.update(pipe.run(Steps.process, all_ranks=True))
pipe.close()
print(*ranks)
"""


@pytest.mark.parametrize("gap", ["0.003", "0.03"])
def test_many_ctrl_c_leave_no_rank(run, gap):
    ranks = [int(pid) for pid in run(MANY, gap)[0].split()]
    assert len(ranks) >= 2
    assert alive(ranks) == []


PROGRAM = """
import os, signal, sys, threading, time
from para_core import launch
from tests.launcher.loads import load_steps

def load():
    time.sleep(3)
    return load_steps()

pipe = None
# A shell that starts pytest in the background lets it ignore SIGINT, and its children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pipe = launch(load, ranks=2)
except KeyboardInterrupt:
    print("interrupted", pipe)
"""


def test_ctrl_c_while_ranks_load_waits_and_says_so(run):
    out, err = run(PROGRAM)
    assert out == "interrupted None\n"
    assert "Ctrl-C again ends them" in err
