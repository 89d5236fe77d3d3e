"""The end of the ranks with their caller, however it ends."""

import gc
import time
import weakref

import pytest

from para_core import launch
from tests.launcher.loads import alive, load_steps, pids, require_no_process

# No guard of __main__: ranks do not import this program.
PROGRAM = """
import os, sys, threading, time
from para_core import launch
from tests.launcher.loads import Steps, load_steps

how = sys.argv[1]
pipe = launch(load_steps, ranks=2, progress=False)
print(*pipe.run(Steps.process, all_ranks=True), flush=True)
if how == "exit":
    sys.exit(0)
if how == "raise":
    raise SystemError("own")
if how == "sleep":
    time.sleep(600)
if how == "call":
    pipe(1, before=600)
if how == "fork" and os.fork() == 0:
    time.sleep(8)
    os._exit(0)
if how == "fork":
    time.sleep(600)
if how == "forked call":
    child = os.fork()
    if child == 0:
        try:
            pipe(1)
        except RuntimeError as error:
            print("fork" in str(error), flush=True)
        del pipe
        sys.exit(0)
    os.waitpid(child, 0)
    print(pipe(1), flush=True)
if how == "thread":
    made = []
    thread = threading.Thread(target=lambda: made.append(launch(load_steps, ranks=2, progress=False)))
    thread.start()
    thread.join()
    time.sleep(2)
    print(made[0](2), flush=True)
if how == "thread calls":
    threading.Thread(target=lambda: pipe(1, before=600), daemon=True).start()
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [
        pytest.param("end", 0, "", marks=pytest.mark.long),
        pytest.param("exit", 0, "", marks=pytest.mark.long),
        ("raise", 1, ""),
        ("forked call", 0, "True\n{}\n"),
        ("thread", 0, "{}\n"),
        ("thread calls", 0, ""),
    ],
)
def test_ranks_end_with_the_program(start, how, code, printed):
    with start(PROGRAM, how) as program:
        ranks = [int(pid) for pid in program.stdout.readline().split()]
        out, err = program.communicate(timeout=120)
    assert len(ranks) == 2
    assert (program.returncode, out) == (code, printed), err
    require_no_process(ranks)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("call", 9),
        ("fork", 9),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("sleep", 9), ("sleep", 15), ("call", 1))),
    ],
)
def test_ranks_end_with_a_killed_program(start, how, number):
    program = start(PROGRAM, how)
    ranks = [int(pid) for pid in program.stdout.readline().split()]
    time.sleep(0.5)
    assert len(alive(ranks)) == 2
    program.send_signal(number)
    require_no_process(ranks)
    program.kill()
    program.communicate(timeout=60)


def test_garbage_collection_ends_the_ranks():
    pipe = launch(load_steps, ranks=2, progress=False)
    ranks, handle = pids(pipe), weakref.ref(pipe)
    del pipe
    gc.collect()
    assert handle() is None
    require_no_process(ranks)


def test_processes_of_a_rank_end_with_it():
    def begin(pipe):
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    with launch(load_steps, ranks=1, progress=False) as pipe:
        child = pipe.run(begin)
        assert alive([child]) == [child]
    require_no_process([child])
