"""Budgets of Python calls: how many functions of para_core run where a pipeline is changed, in a step, in one call."""

import pytest

from benchmarks.walks import measure

# The largest number of calls, a little above the numbers that docs and benchmarks/results/walks.json give.
BUDGETS = {
    "parallelize_pipe": 800,
    "a step": 180,
    "a step that the cache computes": 232,
    "a step that the cache skips": 150,
    "an SDPA call, ulysses of 2": 22,
    "an SDPA call, ring of 2": 42,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the cache of the")
def test_walks_stay_in_their_budgets(rank_pool):
    walks, _ = rank_pool.run(measure, 2)
    calls = {name: walks[name]["calls"] for name in BUDGETS}
    assert all(calls[name] <= budget for name, budget in BUDGETS.items()), calls
    assert min(calls.values()) > 10
