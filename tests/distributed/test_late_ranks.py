"""Exchanges that wait for ranks that are late, or that never make the call."""

import re
import time
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

from para_core.adapters import parallelize_pipe
from para_core.distributed import late_ranks
from para_core.distributed.agree import agree
from para_core.distributed.mesh import guided_mesh
from tests.modes.outcomes import logged, outcome
from tests.tiny import cpu_mesh, flux_call, flux_pipe


def lines_and_outcome(call):
    """Return the lines that ``call`` logs about late ranks, and its result or error."""
    with mock.patch.object(late_ranks, "FIRST_LOOK", 1.5), logged(late_ranks.__name__) as lines:
        return lines, outcome(call)


def arrive_late(late, seconds):
    mesh = guided_mesh(cpu_mesh(1, dist.get_world_size()))
    if dist.get_rank() in late:
        time.sleep(seconds)
    return lines_and_outcome(lambda: agree({}, mesh, call="the TestPipeline"))


def test_late_ranks_are_logged_by_one_rank_and_then_the_call_goes_on(rank_pool):
    results = rank_pool.run(arrive_late, 4, [1, 2], 2.5)
    assert [error for _, error in results] == [[()] * 4] * 4
    assert [len(lines) for lines, _ in results] == [1, 0, 0, 0]
    assert re.search(r"the TestPipeline.*rank 1, rank 2\b(?!.*rank 3)", results[0][0][0])
    assert rank_pool.run(arrive_late, 2, [1], 0.2) == [([], [()] * 2)] * 2


def test_exchange_that_ends_just_after_a_wait_has_succeeded():
    work = mock.Mock(**{"is_completed.return_value": True})
    late_ranks.wait_for_late_ranks(work, RuntimeError("Operation timed out!"), None, None, "the call")
    work.wait.assert_called_once_with()


def call_on_one_rank():
    """Make a call on rank 0 only, while rank 1 lives on. Return the lines logged there and the error."""
    ranks = dist.new_group(timeout=timedelta(seconds=4))
    pipe = parallelize_pipe(flux_pipe(shared_parts=False), mesh=ranks, timeout=4.0)
    if dist.get_rank() == 1:
        time.sleep(7)
        return None
    return lines_and_outcome(lambda: pipe(**flux_call()))


def test_call_on_one_rank_names_the_absent_ranks(rank_pool):
    (lines, error), _ = rank_pool.run(call_on_one_rank, 2)
    for text in (lines[0], error):
        assert "FluxPipeline" in text and "rank 1" in text
