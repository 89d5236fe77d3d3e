"""Tiles of a causal block, compared element by element with the mask that they replace."""

import doctest
from importlib import import_module

import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core.attention.tiles import Causal, Tiling
from para_core.layout.runs import coalesce, cut

# The runs are disjoint: lengths and gaps alternate.
RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=4).map(
    lambda parts: [
        (sum(gap + length for gap, length in parts[:i]) + gap, length) for i, (gap, length) in enumerate(parts)
    ]
)


def positions(runs):
    return torch.cat([torch.arange(0), *[torch.arange(start, start + length) for start, length in runs]])


def test_the_docstrings_are_right():
    results = doctest.testmod(import_module("para_core.attention.tiles"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def add_tile(rows, tile):
    for start, length in tile.runs:
        block = torch.ones(len(rows), length, dtype=torch.int)
        rows[:, start : start + length] += block.tril() if tile.is_causal else block


@given(queries=RUNS, keys=RUNS)
def test_tiles_cover_a_causal_mask_once(queries, keys):
    check_tiles(queries, keys, [Causal()], lambda query, key: query >= key)


def check_tiles(queries, keys, masks, sees):
    """Check that the tiles of queries and keys, in any order, contain what the masks show, once."""
    expected = sees(positions(queries)[:, None], positions(keys)[None, :])
    visits = torch.zeros_like(expected, dtype=torch.int)
    tiling = Tiling(queries, [keys], masks)
    rows = visits.split([length for _, length in tiling.pieces])
    for piece, tile in tiling.tiles(0):
        held = positions(keys)[positions(tile.runs)]
        assert torch.equal(held, positions(tile.positions))
        add_tile(rows[piece], tile)
    assert torch.equal(visits, expected.int())


@given(queries=RUNS, keys=RUNS, order=st.randoms(use_true_random=False))
def test_tokens_in_any_order_have_the_same_tiles(queries, keys, order):
    order.shuffle(queries)
    order.shuffle(keys)
    check_tiles(queries, keys, [Causal()], lambda query, key: query >= key)


@given(runs=RUNS)
def test_cutting_and_coalescing_lose_no_token(runs):
    assert torch.equal(positions(cut(runs, [2, 5, 7, 107])), positions(runs))
    assert torch.equal(positions(coalesce(runs[::-1])), positions(runs))
