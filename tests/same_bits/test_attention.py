"""Attention of some of the queries: blocks of a CPU, and the parts into which FlashAttention splits keys on a GPU."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core import Segment
from para_core.attention.query_blocks import place_in_blocks
from para_core.same_bits.device_settings import deterministic_products
from para_core.same_bits.flash_splits import AttentionSizes, flash_splits
from para_core.same_bits.found import Found
from para_core.same_bits.one_process import UNKNOWN, OneProcess
from para_core.same_bits.row_check import RowCheck


def rows(x, runs):
    return torch.cat([x.narrow(-2, start, length) for start, length in runs], dim=-2)


@settings(max_examples=60)
@given(
    total=st.one_of(st.integers(1, 100), st.integers(180, 300), st.integers(760, 1100)),
    keys=st.sampled_from([1, 7, 33, 343, 600]),
    cuts=st.lists(st.integers(0, 1100), min_size=3, max_size=3),
    late_first=st.booleans(),
    width=st.sampled_from([8, 12, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_queries_in_blocks_have_the_bits_of_all_queries(total, keys, cuts, late_first, width, dtype):
    torch.manual_seed(total)
    first, second, third = sorted(min(cut, total) for cut in cuts)
    runs = [(first, second - first), (third, total - third)]
    if late_first:
        runs.reverse()
    query, key, value = (torch.randn(1, size, 2, width, dtype=dtype).transpose(1, 2) for size in (total, keys, keys))
    expected = rows(F.scaled_dot_product_attention(query, key, value), runs)
    blocks = place_in_blocks(runs, total)
    assert blocks.total <= max(total, 32)
    if expected.shape[-2]:
        out = F.scaled_dot_product_attention(blocks.place(rows(query, runs)), key, value)
        assert torch.equal(blocks.take(out), expected)


# The numbers follow from the formula: an H100 has 132 multiprocessors, which hold 264 blocks of threads.
@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        (AttentionSizes(1, 24, 4608, 4608, 128), 1),  # FLUX at 1024 × 1024: 1728 blocks.
        (AttentionSizes(1, 3, 4608, 4608, 128), 1),  # 216 blocks are more than 0.8 of them,
        (AttentionSizes(1, 3, 4400, 4400, 128), 5),  # and 207 are not; 5 parts fill 3.92 of 4 waves.
        (AttentionSizes(1, 1, 64, 64, 64), 1),  # One block of 256 keys cannot be split.
        (AttentionSizes(1, 1, 64, 1024, 64), 4),
        (AttentionSizes(2, 1, 64, 1024, 256), 16),
        (AttentionSizes(1, 24, 0, 512, 128), 1),  # A rank without tokens.
    ],
)
def test_parts_of_keys_on_a_gpu(sizes, splits):
    assert flash_splits(sizes, multiprocessors=132) == splits


def test_splits_of_products_are_as_before_after_each_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with deterministic_products():
        with deterministic_products():
            pass
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k


# A rank attends to a text (512 keys) with all heads: 550 queries with 24 heads fill an H100 to 0.8, 275 with 12 less.
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "found"),
    [(24, 550, 550, True), (48, 550, 550, False), (24, 550, 512, False), (12, 275, 512, True)],
)
def test_a_rank_that_splits_keys_otherwise_is_found(heads, queries, keys, found):
    query = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=torch.Size((1, heads, queries, 128)), ndim=4)
    key = mock.Mock(shape=torch.Size((1, heads, keys, 128)), ndim=4)
    one = OneProcess((Segment("", 8 * queries),), 0, 8, ulysses=8)
    check = RowCheck(Found(), mock.Mock(sequences_of=lambda _: UNKNOWN))
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=132)):
        check.compare_splits(one, query, key, key)
    assert bool(check.findings) == found
