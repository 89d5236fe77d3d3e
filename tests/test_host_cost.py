"""The benchmark of host cost: its claims hold, and each way runs."""

from functools import partial

import pytest

from benchmarks.attention import mesh as host_cost
from benchmarks.harness import calls_in_python


def test_ratios_are_of_the_same_round_and_turns_alternate():
    now, order = [0.0], []

    def way(name, seconds):
        order.append(name)
        now[0] += seconds

    ways = {"slow, by hand": partial(way, "a", 2.0), "slow, eager": partial(way, "b", 3.0)}
    rows = host_cost.measure(ways, 2, lambda: now[0], calls=2, base=host_cost.by_hand_of)
    assert order[:8] == ["a", "a", "b", "b", "a", "b", "b", "a"]
    assert rows["slow, eager"]["against"] == "slow, by hand"
    assert rows["slow, eager"]["ratio"] == 1.5
    assert rows["slow, eager"]["median us"] == 1.5e6
    assert rows["slow, by hand"]["ratio"] == 1.0


def test_python_calls_are_counted_those_of_c_too():
    def inner():
        return len([])

    def three():
        inner()
        abs(-1)

    assert calls_in_python(three) - calls_in_python(lambda: None) == 3


@pytest.mark.slow
def test_flux_is_measured_each_way_with_few_blocks():
    rows = host_cost.measure_flux(1, width=8, text=4, image=12, blocks=(1, 1))
    assert {"unmodified", "ulysses", "ring", "ulysses, by hand"} <= set(rows)
    assert rows["unmodified"]["python calls"] == rows["unmodified, again"]["python calls"]
    assert rows["unmodified"]["python calls"] < rows["ulysses, by hand"]["python calls"]
