"""Copies of runs of tokens, compared with indexing by the positions of the runs."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core.layout.tokens import copy_runs


@given(
    order=st.permutations(range(4)),
    dim=st.integers(-4, 3),
    cuts=st.lists(st.integers(0, 6), min_size=2, max_size=6),
)
def test_a_copy_of_runs_lies_in_memory_as_the_tensor_does(order, dim, cuts):
    cuts = sorted(cuts)
    runs = [(start, end - start) for start, end in zip(cuts[0::2], cuts[1::2], strict=False)]
    sizes = [2, 3, 4, 5]
    sizes[dim] = 6
    inverse = [order.index(axis) for axis in range(4)]
    x = torch.arange(6 * 120 // [2, 3, 4, 5][dim]).view([sizes[axis] for axis in order]).permute(inverse)

    part = copy_runs(x, dim, runs)

    positions = list(chain.from_iterable(range(start, start + length) for start, length in runs))
    assert torch.equal(part, x.index_select(dim, torch.tensor(positions, dtype=torch.int64)))
    assert part.permute(order).is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes
