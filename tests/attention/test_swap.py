"""The swap of tokens for heads, rank by rank, compared with tokens and heads written out one by one."""

import doctest
from importlib import import_module
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from para_core import Segment, SequenceLayout
from para_core.attention import swap
from para_core.attention.block_rows import BlockRows
from para_core.attention.swap import ToHeads, ToTokens
from para_core.attention.ulysses import Heads
from para_core.distributed.collectives import Travelling
from para_core.distributed.mesh import MeshDim
from para_core.layout.held import Layout

KINDS = [(False, False), (True, False), (False, True)]
SEGMENTS = st.lists(
    st.builds(lambda total, kind: Segment("", total, *kind), st.integers(0, 9), st.sampled_from(KINDS)),
    min_size=1,
    max_size=3,
).map(tuple)


def test_the_docstrings_are_right():
    results = doctest.testmod(import_module("para_core.attention.swap"))
    assert results.attempted > 0
    assert results.failed == 0


def run_all(make, tensors_of_ranks, *, grad=False):
    """Run the swap of every rank of a group in this process, and return the results of each rank.

    With ``grad``, autograd is on, so that nothing may be written into a buffer.
    """
    size, sent = len(tensors_of_ranks), []

    def start(buffer, send_sizes, receive_sizes, dim, *, even=False):
        sent.append(buffer.reshape(-1).split(send_sizes))
        return Travelling((dim.index, receive_sizes), None)

    def arrive(started):
        index, receive_sizes = started.buffer
        arrived = torch.cat([parts[index] for parts in sent])
        assert [len(parts[index]) for parts in sent] == list(receive_sizes)
        return arrived

    started = mock.patch.multiple(swap, start_all_to_all=start, wait=arrive)
    with started, torch.set_grad_enabled(grad):
        dims = [MeshDim("ulysses", size, rank, "", None) for rank in range(size)]
        finish = [make(dim).start(of) for dim, of in zip(dims, tensors_of_ranks, strict=True)]
        return [list(of_rank()) for of_rank in finish]


def take(x, runs):
    index = [position for start, length in runs for position in range(start, start + length)]
    return x[:, :, torch.tensor(index, dtype=torch.long)]


@pytest.mark.parametrize(("by_kernel", "grad"), [(False, False), (True, False), (False, True)])
@given(
    queries=SEGMENTS,
    keys=st.none() | SEGMENTS,
    groups=st.integers(1, 2),
    size=st.integers(2, 4),
    heads=st.sampled_from([(4, 4), (3, 3), (1, 1), (6, 2), (4, 1), (6, 3), (0, 0)]),
    widths=st.sampled_from([(4, 4), (4, 8)]),
)
def test_swapping_and_swapping_back_moves_each_token_and_head(
    by_kernel, grad, queries, keys, groups, size, heads, widths
):
    layouts = [SequenceLayout(segments, groups * size) for segments in (queries, keys or queries)]
    split = Heads(*heads, size)
    of_heads = (split.of_query, split.of_key, split.of_key)
    totals = [layouts[0].total, layouts[1].total, layouts[1].total]
    shapes = zip((heads[0], heads[1], heads[1]), totals, (widths[0], widths[0], widths[1]), strict=True)
    whole = [torch.randn(2, number, total, width) for number, total, width in shapes]
    group = groups - 1
    ranks = range(group * size, (group + 1) * size)
    layout_of = (layouts[0], layouts[1], layouts[1])
    local = [[take(x, layout.runs(rank)) for x, layout in zip(whole, layout_of, strict=True)] for rank in ranks]

    def rows(index):
        made = [BlockRows(layout, group * size, size, index) for layout in layouts]
        return (made[0], made[0], made[0]) if keys is None else (made[0], made[1], made[1])

    with mock.patch.object(swap, "takes_kernels", lambda _: by_kernel):
        blocks = run_all(lambda dim: ToHeads(rows(dim.index), of_heads, dim), local, grad=grad)
        for rank, of_rank in enumerate(blocks):
            for block, x, layout, runs in zip(of_rank, whole, layout_of, of_heads, strict=True):
                expected = take(x, Layout.of(layout).grouped(size).runs(group)).narrow(1, *runs[rank])
                assert torch.equal(block, expected)
        outs = [[of_rank[0]] for of_rank in blocks]
        back = run_all(lambda dim: ToTokens(rows(dim.index)[:1], of_heads[:1], dim, replicated=True), outs, grad=grad)
        for (out,), (query, _, _) in zip(back, local, strict=True):
            assert torch.equal(out, query)
            assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("by_kernel", [False, True])
@given(queries=SEGMENTS, size=st.integers(2, 4), heads=st.sampled_from([(4, 4), (3, 3), (6, 2), (4, 1), (6, 3)]))
def test_gradients_are_the_transpose_of_the_swap(by_kernel, queries, size, heads):
    layout, split = SequenceLayout(queries, size), Heads(*heads, size)
    numbers, of_heads = (heads[0], heads[1], heads[1]), (split.of_query, split.of_key, split.of_key)

    def make(kind, indices, **options):
        def of(dim):
            rows = BlockRows(layout, 0, size, dim.index)
            return kind([rows for _ in indices], [of_heads[index] for index in indices], dim, **options)

        return of

    def like(tensors):
        return [[torch.randint(-9, 9, x.shape).double() for x in of_rank] for of_rank in tensors]

    def dot(a, b):
        return sum((x * y).sum() for of_a, of_b in zip(a, b, strict=True) for x, y in zip(of_a, of_b, strict=True))

    with mock.patch.object(swap, "takes_kernels", lambda _: by_kernel):
        x = like([[torch.empty(1, number, layout.size(rank), 4) for number in numbers] for rank in range(size)])
        y = run_all(make(ToHeads, (0, 1, 2)), x)
        grad_y = like(y)
        assert dot(grad_y, y) == dot(run_all(make(ToTokens, (0, 1, 2)), grad_y), x)
        x = [[of_rank[0]] for of_rank in y]
        y = run_all(make(ToTokens, (0,), replicated=True), x)
        grad_y = like(y)
        assert dot(grad_y, y) == dot(run_all(make(ToHeads, (0,), replicated=True), grad_y), x)
