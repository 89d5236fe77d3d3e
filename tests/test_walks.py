"""Budgets of Python calls: how many functions of para_core run where a pipeline is changed, in a step, in one call."""

import pytest

from benchmarks.walks import COUNTED_STEP, counted, measure
from para_core.layout.sequence import Segment, even_layout

# The largest number of calls, a little above the numbers that docs and benchmarks/results/walks.json give.
BUDGETS = {
    "parallelize_pipe": 1100,
    "a step": 205,
    "a step that the cache computes": 252,
    "a step that the cache skips": 150,
    "an SDPA call, ulysses of 2": 30,
    "an SDPA call, ring of 2": 44,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the cache of the")
def test_walks_stay_in_their_budgets(rank_pool):
    walks, _ = rank_pool.run(measure, 2)
    calls = {name: walks[name]["calls"] for name in BUDGETS}
    assert all(calls[name] <= budget for name, budget in BUDGETS.items()), calls
    assert COUNTED_STEP > 1 and min(calls.values()) > 10


def test_counter_counts_python_functions_of_the_package_only():
    with counted() as walk:
        even_layout(8, 2)
        len([])
        sorted([2, 1])
    summary = walk.summary()
    assert summary["calls"] >= 1 and summary["files"] == 1
    assert any("even_layout" in name for name in summary["functions"])
    assert Segment("image", 3).total == 3
