"""Tiles of causal and block masks, compared element by element with the masks that they replace."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core.attention.tiles import Causal, Tiling
from para_core.layout.runs import coalesce, cut

# The runs are disjoint: lengths and gaps alternate. They come in any order.
RUNS = (
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=4)
    .map(
        lambda parts: [
            (sum(gap + length for gap, length in parts[:i]) + gap, length) for i, (gap, length) in enumerate(parts)
        ]
    )
    .flatmap(st.permutations)
)


def positions(runs):
    return torch.cat([torch.arange(0), *[torch.arange(start, start + length) for start, length in runs]])


@given(queries=RUNS, keys=RUNS, seed=st.integers(0, 99), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_tiles_contain_what_causal_and_block_masks_show_once(queries, keys, seed, sizes):
    from para_core.attention.block_sparse import read_block_mask

    shown = torch.rand(40, 40, generator=torch.Generator().manual_seed(seed)) < 0.5
    blocks = read_block_mask(shown, sizes)
    query, key = positions(queries)[:, None], positions(keys)[None, :]
    causal, of_blocks = query >= key, shown[query // sizes[0], key // sizes[1]]
    for masks, expected in [
        ([Causal()], causal),
        ([blocks], of_blocks),
        ([Causal(), blocks], causal & of_blocks),
    ]:
        visits = torch.zeros_like(expected, dtype=torch.int)
        tiling = Tiling(queries, [keys], masks)
        rows = visits.split([length for _, length in tiling.pieces])
        for piece, tile in tiling.tiles(0):
            assert torch.equal(positions(keys)[positions(tile.runs)], positions(tile.positions))
            for start, length in tile.runs:
                block = torch.ones(len(rows[piece]), length, dtype=torch.int)
                rows[piece][:, start : start + length] += block.tril() if tile.is_causal else block
        assert torch.equal(visits, expected.int())


@given(runs=RUNS)
def test_cutting_and_coalescing_lose_no_token(runs):
    runs = sorted(runs)
    assert torch.equal(positions(cut(runs, [2, 5, 7, 107])), positions(runs))
    assert torch.equal(positions(coalesce(runs[::-1])), positions(runs))
