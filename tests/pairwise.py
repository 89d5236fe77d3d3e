"""Combinations in which every two values of two axes occur together, for tests with several independent axes."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def _pairs(indices: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(i, j, indices[i], indices[j]) for i, j in combinations(range(len(indices)), 2)}


def _covering(axes: tuple[Sequence[Any], ...]) -> set[tuple[int, ...]]:
    """Return indices of rows that hold every pair of values, chosen greedily."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(_pairs, rows))
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return chosen


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value per axis that hold every pair of values. In the long run return all rows.

    >>> pairwise([0, 1], "ab", "xy")
    [(0, 'a', 'x'), (0, 'b', 'y'), (1, 'a', 'y'), (1, 'b', 'x')]
    """
    if settings.get_current_profile_name() == "long":
        return list(product(*axes))
    chosen = sorted(_covering(axes))
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in chosen]


def long_beyond_pairs(*axes: Sequence[Any]) -> list[Any]:
    """Return all rows as parameters of a test. Rows beyond :func:`pairwise` are marked ``long``."""
    chosen = _covering(axes)
    indices = product(*(range(len(axis)) for axis in axes))
    rows = product(*axes)
    return [
        pytest.param(*row, marks=() if index in chosen else pytest.mark.long)
        for index, row in zip(indices, rows, strict=True)
    ]
