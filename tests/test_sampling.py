"""The cases that run by default show every value of each parameter, if there are enough of them."""

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.sampling import spread


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 70))
def test_sample_shows_every_value_and_no_case_twice(sizes, count):
    cases = [dict(zip("abc", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = spread(cases, count, "seed")
    assert chosen == spread(cases, count, "seed")
    assert len(chosen) == min(count, len(cases))
    assert chosen <= set(range(len(cases)))
    if count >= sum(sizes):
        for axis, size in zip("abc", sizes, strict=False):
            assert {cases[index][axis] for index in chosen} == set(range(size))


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", range(9))
def test_cases_outside_the_sample_are_long(request, size):
    function = request.node.nodeid.partition("[")[0]
    chosen = spread([{"size": size} for size in range(9)], 3, function)
    assert len(chosen) == 3
    assert (request.node.get_closest_marker("long") is None) == (size in chosen)
