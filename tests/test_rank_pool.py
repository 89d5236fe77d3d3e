"""The pool of rank processes: results, errors, hangs, deaths, and recovery from each."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.rank_pool import RankDied, RankPool, RankPoolError, RankPoolTimeout, heartbeat

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool():
    """Return a pool for this file only, so that ranks broken here are not restarted for other tests.

    It has two ranks, because each rank is slow to start.
    """
    pool = RankPool(grace=2.0)
    yield pool
    pool.close()


def gathered_ranks(x, *, scale):
    ranks = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor(float(dist.get_rank())))
    return {"rank": dist.get_rank(), "ranks": torch.stack(ranks), "x": scale * x, "pid": os.getpid()}


def check_works(pool):
    results = pool.run(gathered_ranks, 2, torch.ones(2), scale=3)
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert torch.equal(result["ranks"], torch.tensor([0.0, 1.0]))
        assert torch.equal(result["x"], torch.full((2,), 3.0))


def test_results_come_back_in_rank_order_from_the_same_processes(pool):
    check_works(pool)
    first, second = (
        [result["pid"] for result in pool.run(gathered_ranks, 2, torch.ones(1), scale=1)] for _ in range(2)
    )
    assert first == second == pool.pids(2)
    assert os.getpid() not in first


def make_mesh_and_draw():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["ulysses"].get_group())
    return total, torch.rand(3), torch.empty(3), mesh["ulysses"].get_group().group_name, torch.get_num_threads()


def test_every_job_starts_fresh(pool):
    (total, drawn, empty, group, threads), (_, other_drawn, _, _, _) = pool.run(make_mesh_and_draw, 2)
    assert total == 2
    assert torch.equal(drawn, other_drawn)
    assert torch.isnan(empty).all()
    assert threads == 1
    _, drawn_again, _, group_again, _ = pool.run(make_mesh_and_draw, 2)[0]
    assert torch.equal(drawn, drawn_again)
    # Names count from the start again, so the groups of the previous job are gone.
    assert group == group_again


def warn():
    warnings.warn("from a rank", UserWarning, stacklevel=1)
    return "went on"


def test_warning_filters_hold_on_ranks(pool):
    assert all(isinstance(error, UserWarning) for error in pool.run_expecting_errors(warn, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "from a r", UserWarning)
        assert pool.run(warn, 2) == ["went on", "went on"]


def raise_on(ranks):
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} has 7 tokens; expected 8")
    return "fine"


def test_exceptions_are_raised_or_returned_and_the_pool_recovers(pool):
    with pytest.raises(RankPoolError, match=r"raise_on .*1 of 2 ranks") as caught:
        pool.run(raise_on, 2, [1])
    assert "rank 1:\nTraceback" in str(caught.value)
    assert "ValueError: rank 1 has 7 tokens; expected 8" in str(caught.value)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], ValueError)
    check_works(pool)
    pids = pool.pids(2)
    errors = pool.run_expecting_errors(raise_on, 2, [0, 1])
    assert [str(error) for error in errors] == [f"rank {rank} has 7 tokens; expected 8" for rank in range(2)]
    assert all("in raise_on" in error.__notes__[0] for error in errors)
    fine, error = pool.run_expecting_errors(raise_on, 2, [1])
    assert fine == "fine"
    assert isinstance(error, ValueError)
    # No rank was stuck, so none was replaced.
    assert pool.pids(2) == pids


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__("cannot be unpickled: __init__ wants two arguments")


def raise_stubborn():
    raise Stubborn(1, 2)


def return_a_lambda():
    return lambda: None


def test_unpicklable_value_is_an_error(pool):
    for error in pool.run_expecting_errors(raise_stubborn, 2):
        assert isinstance(error, RankPoolError)
        assert "Stubborn" in str(error)
    for error in pool.run_expecting_errors(return_a_lambda, 2):
        assert "return_a_lambda.<locals>.<lambda>" in str(error)
    check_works(pool)


def test_function_that_ranks_cannot_import_is_refused(pool):
    from tests import unimportable  # Import it here, because the ranks import this file too.

    for fn in (lambda: None, time.sleep.__call__):
        with pytest.raises(TypeError, match="top level"):
            pool.run(fn, 2)
    with pytest.raises(RankPoolError, match="this module does not import on a rank") as caught:
        pool.run(unimportable.never_runs, 2)
    assert list(caught.value.errors) == [0, 1]
    check_works(pool)


def raise_on_one_while_the_other_waits():
    if dist.get_rank() == 0:
        raise ValueError("rank 0 does not like this")
    wait_for_the_others()


def wait_for_the_others():
    dist.barrier()


def test_rank_raising_alone_is_reported_with_other_stack(pool):
    start = time.monotonic()
    with pytest.raises(RankPoolError, match=r"1 of 2 ranks, .*2 s ") as caught:
        pool.run(raise_on_one_while_the_other_waits, 2)
    assert time.monotonic() - start < 30  # The grace ends the wait, not the time-out of the group or of the pool.
    assert "ValueError: rank 0 does not like this" in str(caught.value)
    assert "rank 1 is here:" in str(caught.value)
    assert "in wait_for_the_others" in str(caught.value)
    check_works(pool)


def sleep_on_one_rank():
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_for_the_others()


def test_a_hang_fails_with_the_stack_of_every_rank(pool):
    with pytest.raises(RankPoolTimeout, match=r"sleep_on_one_rank .*2 s .*2 ranks") as caught:
        pool.run(sleep_on_one_rank, 2, timeout=2.0)
    first, second = str(caught.value).split("rank 1 is here:")
    assert "rank 0 is here:" in first
    assert "in wait_for_the_others" in first
    assert "in sleep_on_one_rank" in second
    assert "in wait_for_the_others" not in second
    check_works(pool)


def beat_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        heartbeat()
        time.sleep(0.1)
    return "done"


@pytest.mark.long
def test_a_slow_job_that_beats_is_not_hung(pool):
    assert pool.run(beat_for, 2, 5.0, timeout=3.0) == ["done", "done"]


def die_on_one_rank(how):
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(1.0)  # Wait until the other rank waits.
        how()
    wait_for_the_others()


def exit_3():
    os._exit(3)


@pytest.mark.parametrize(("how", "code"), [(exit_3, "exit code 3"), (os.abort, r"exit code -6 \(SIGABRT\)")])
def test_dying_rank_is_reported_with_exit_code(pool, how, code):
    start = time.monotonic()
    with pytest.raises(RankDied, match=rf"rank 0 died .*die_on_one_rank .*{code}") as caught:
        pool.run(die_on_one_rank, 2, how)
    assert time.monotonic() - start < 40  # Most of this time is the start of the ranks.
    # Rank 1 still waits, or was told already that its peer is gone.
    dead, other = re.split("rank 1 (?:is here|raised):", str(caught.value))
    assert "in wait_for_the_others" in other
    if how is os.abort:
        assert "rank 0 died here:" in dead
        assert "in die_on_one_rank" in dead
    check_works(pool)


def test_death_between_jobs_is_reported_by_the_next(pool):
    check_works(pool)
    os.kill(pool.pids(2)[1], signal.SIGKILL)
    with pytest.raises(RankDied, match=r"rank 1 died .* exit code -9 \(SIGKILL\)"):
        pool.run(gathered_ranks, 2, torch.ones(1), scale=1)
    check_works(pool)


def slow_backend(graph, inputs):
    time.sleep(6)
    return graph.forward


def double(x):
    return x * 2


def compile_slowly():
    return torch.compile(double, backend=slow_backend, fullgraph=True)(torch.ones(2))


def compile_quickly():
    return torch.compile(double, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.long
def test_compiling_is_progress_up_to_its_limit(pool):
    pool.run(compile_quickly, 2)  # This imports Dynamo, which takes seconds and does not count as compiling.
    for out in pool.run(compile_slowly, 2, timeout=3.0):
        assert torch.equal(out, torch.full((2,), 2.0))
    impatient = RankPool(compile_limit=1.0)
    try:
        impatient.run(compile_quickly, 1)
        with pytest.raises(RankPoolTimeout, match="no progress for 2 s") as caught:
            impatient.run(compile_slowly, 1, timeout=2.0)
        assert "in slow_backend" in str(caught.value)
    finally:
        impatient.close()


SLOW_ON_A_RANK = """
import multiprocessing, os, time

if multiprocessing.parent_process() is not None:
    time.sleep(4)

def place():
    return os.getcwd(), os.environ["RANK_POOL_TEST"], os.environ["OMP_NUM_THREADS"], os.environ["RANK"]
"""


@pytest.mark.long
def test_ranks_inherit_path_and_environment(tmp_path, monkeypatch):
    (tmp_path / "slow_on_a_rank.py").write_text(SLOW_ON_A_RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK_POOL_TEST", "set after the process that ranks are forked from had started")
    import slow_on_a_rank

    pool = RankPool()
    try:
        places = pool.run(slow_on_a_rank.place, 2, timeout=2.0)
    finally:
        pool.close()
    for rank, (folder, variable, threads, index) in enumerate(places):
        assert Path(folder) == tmp_path
        assert variable.startswith("set after")
        assert (threads, index) == ("1", str(rank))


def imported_before_the_job():
    parent = Path(f"/proc/{os.getppid()}")
    return {
        "modules": [name for name in ("torch", "diffusers", "para_core", "tests.tiny") if name in sys.modules],
        "is the test's process": multiprocessing.parent_process().pid == os.getppid(),
        "threads": len(list((parent / "task").iterdir())) if parent.exists() else 1,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a CUDA device, ranks are spawned")
def test_ranks_fork_from_single_thread_with_models(pool):
    for state in pool.run(imported_before_the_job, 2):
        assert state == {
            "modules": ["torch", "diffusers", "para_core", "tests.tiny"],
            "is the test's process": False,
            "threads": 1,
        }


def test_closing_ends_the_processes(pool):
    check_works(pool)
    pids = pool.pids(2)
    pool.close()
    assert pool.pids(2) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


PARENT_THAT_IS_KILLED = """
import os, signal
from tests.rank_pool import RankPool

if __name__ == "__main__":
    pool = RankPool()
    pool.run(os.getpid, 1)
    print(pool.pids(1)[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_the_ranks_end_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT_THAT_IS_KILLED)
    # Ranks without diffusers start in half the time.
    (tmp_path / "diffusers.py").write_text("raise ImportError('no diffusers here')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    # The rank notices within a quarter of a second. Ending takes Python and torch a moment on busy cores.
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(result.stdout), 0)
            time.sleep(0.1)
