"""The pool of rank processes: results, errors, hangs, deaths, and recovery from each."""

import os
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.rank_pool import RankDied, RankPool, RankPoolError, RankPoolTimeout

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool():
    """Return a pool of two ranks for this file only, so that ranks broken here are not restarted for other tests."""
    pool = RankPool(grace=2.0)
    yield pool
    pool.close()


def draw(x, *, scale):
    """Return what a job sees: ranks, arguments, random and uninitialized numbers, its process."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total, group=mesh["ulysses"].get_group())
    state = {
        "drawn": torch.rand(3).tolist(),
        "variables": (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], str(Path.cwd())),
    }
    return {"total": total, "x": scale * x, "empty": torch.empty(3), "pid": os.getpid(), "state": state}


def check_works(pool):
    """Run a job, check its results, and return the process ids."""
    results = pool.run(draw, 2, torch.ones(2), scale=3)
    for rank, result in enumerate(results):
        assert result["total"] == 3 and torch.equal(result["x"], torch.full((2,), 3.0))
        assert torch.isnan(result["empty"]).all()
        assert result["state"]["variables"] == (str(rank), "2", "1", str(Path.cwd()))
        assert result["state"]["drawn"] == results[0]["state"]["drawn"]
    return [result["pid"] for result in results]


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__("cannot be unpickled: __init__ wants two arguments")


def misbehave(ranks, how):
    if dist.get_rank() not in ranks:
        return "fine"
    if how == "lambda":
        return lambda: None
    if how == "warn":
        warnings.warn("from a rank", UserWarning, stacklevel=1)
        return "went on"
    raise Stubborn(1, 2) if how == "stubborn" else ValueError(f"rank {dist.get_rank()} has 7 tokens; expected 8")


def test_exceptions_are_raised_or_returned_and_the_pool_recovers(pool):
    pids = check_works(pool)
    with pytest.raises(RankPoolError, match=r"misbehave .*1 of 2 ranks") as caught:
        pool.run(misbehave, 2, [1], "raise")
    assert "rank 1:\nTraceback" in str(caught.value)
    assert "ValueError: rank 1 has 7 tokens; expected 8" in str(caught.value)
    assert list(caught.value.errors) == [1] and isinstance(caught.value.errors[1], ValueError)
    fine, error = pool.run_expecting_errors(misbehave, 2, [1], "raise")
    assert fine == "fine" and isinstance(error, ValueError) and "in misbehave" in error.__notes__[0]
    for error in pool.run_expecting_errors(misbehave, 2, [0, 1], "stubborn"):
        assert isinstance(error, RankPoolError) and "Stubborn" in str(error)
    for error in pool.run_expecting_errors(misbehave, 2, [0, 1], "lambda"):
        assert "misbehave.<locals>.<lambda>" in str(error)
    assert all(isinstance(error, UserWarning) for error in pool.run_expecting_errors(misbehave, 2, [0, 1], "warn"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "from a r", UserWarning)
        assert pool.run(misbehave, 2, [0, 1], "warn") == ["went on", "went on"]
    # No rank was stuck, so none was replaced.
    assert check_works(pool) == pids


def wait_for_the_others():
    dist.barrier()


def leave_the_other_alone(how):
    """Raise, die or hang on rank 0, while rank 1 waits."""
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # Wait until the other rank waits.
        how()
    wait_for_the_others()


def raise_alone():
    raise ValueError("rank 0 does not like this")


def hang():
    time.sleep(600)


def exit_3():
    os._exit(3)


@pytest.mark.parametrize(
    ("how", "error", "message", "words"),
    [
        (raise_alone, RankPoolError, r"1 of 2 ranks, .*2 s ", "ValueError: rank 0 does not like this"),
        (hang, RankPoolTimeout, r"leave_the_other_alone .*2 s .*2 ranks", "rank 0 is here:"),
        (exit_3, RankDied, r"rank 0 died .*leave_the_other_alone .*exit code 3", "rank 0 died here:"),
    ],
)
def test_failure_of_one_rank_shows_every_stack(pool, how, error, message, words):
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        pool.run(leave_the_other_alone, 2, how, timeout=2.0 if how is hang else 60.0)
    assert time.monotonic() - start < 40  # The grace ends the wait, not the time-out of the group.
    # Rank 1 still waits, or was told already that its peer is gone.
    first, second = re.split("rank 1 (?:is here|raised):", str(caught.value))
    assert words in first and "in wait_for_the_others" not in first
    assert "in wait_for_the_others" in second
    check_works(pool)
