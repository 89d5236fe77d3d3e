"""The end of the ranks with their caller, however it ends."""

import gc
import subprocess
import time
import weakref

import pytest

from para_core import launch
from para_core.launcher.processes import start_local_ranks
from tests.launcher.loads import alive, load_steps, pids, require_no_process

# No guard of __main__: ranks do not import this program.
PROGRAM = """
import os, pathlib, sys, threading, time
from para_core import launch
from tests.launcher.loads import load_steps, pids

sys.path.append(pathlib.Path())  # Python ignores what is no string.
pipe = launch(load_steps, ranks=2, progress=False)
print(*pids(pipe), flush=True)
"""
RAISE = """
child = os.fork()
if child == 0:
    for use in (lambda: pipe(1), pipe.restart):
        try:
            use()
        except RuntimeError as error:
            print("fork" in str(error), flush=True)
    del pipe
    sys.exit(0)
os.waitpid(child, 0)
made = []
thread = threading.Thread(target=lambda: made.append(launch(load_steps, ranks=1, progress=False)))
thread.start()
thread.join()
time.sleep(1.5)
print(pipe(1), made[0](2), flush=True)
threading.Thread(target=lambda: pipe(1, before=600), daemon=True).start()
time.sleep(0.5)
raise SystemError("own")
"""
WAIT = """
if os.fork() == 0:
    time.sleep(5)
    os._exit(0)
pipe(1, before=600)
"""


def test_ranks_live_with_the_process_of_their_program_and_end_with_it(start):
    with start(PROGRAM + RAISE) as program:
        ranks = [int(pid) for pid in program.stdout.readline().split()]
        out, err = program.communicate(timeout=120)
    assert len(ranks) == 2
    assert (program.returncode, out) == (1, "True\nTrue\n{} {}\n"), err
    assert "SystemError: own" in err
    require_no_process(ranks)


@pytest.mark.long
def test_ranks_end_with_a_killed_program(start):
    program = start(PROGRAM + WAIT)
    ranks = [int(pid) for pid in program.stdout.readline().split()]
    time.sleep(0.5)
    assert len(alive(ranks)) == 2
    program.kill()
    require_no_process(ranks)
    program.communicate(timeout=60)


def test_garbage_collection_ends_the_ranks_and_their_processes():
    pipe = launch(load_steps, ranks=1, progress=False)
    processes, handle = [*pids(pipe), pipe.run(lambda _: subprocess.Popen(["sleep", "600"]).pid)], weakref.ref(pipe)
    assert alive(processes) == processes
    del pipe
    gc.collect()
    assert handle() is None
    # Ranks whose start was interrupted before a handle had them.
    (rank,) = start_local_ranks(1, None, {}).members
    require_no_process([*processes, rank.pid])
