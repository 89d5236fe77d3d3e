"""Masks that are known to have a rank's rows: those that were sharded, and those whose rows are equal. These tests
need no ranks.
"""

import io

import pytest
import torch

from para_core.attention.mask_rows import (
    COLUMNS_SHARDED,
    HIDES,
    ROWS_EQUAL,
    ROWS_SHARDED,
    check_rows,
    copy_mark,
    describe_rows,
    follow_parts,
    mark_of,
    mark_part,
)
from para_core.attention.spec import AttentionSpec
from para_core.distributed.mesh import one_rank
from para_core.layout.sequence import Segment, SequenceLayout, even_layout

LAYOUT = even_layout(8, 2)
BALANCED = even_layout(8, 2, balanced=True)
TOGETHER = SequenceLayout((Segment("text", 4), Segment("image", 4)), 2)


def causal_rows(dtype=torch.bool):
    return torch.ones(4, 8, dtype=dtype).tril()


def sharded_rows(dtype=torch.bool, layout=LAYOUT):
    mask = causal_rows(dtype)
    mark_part(mask, 0, layout, 0)
    return mask


def bits_of(mask, layout=LAYOUT, rank=0):
    return describe_rows(mask, layout, layout, rank)


@pytest.mark.parametrize(("made_by", "used_by", "known"), [(x, y, x is y) for x in (LAYOUT, BALANCED, TOGETHER)
                                                           for y in (LAYOUT, BALANCED, TOGETHER)])  # fmt: skip
def test_rows_are_known_by_the_layout_that_made_them(made_by, used_by, known):
    assert bits_of(sharded_rows(layout=made_by), used_by) == (ROWS_SHARDED if known else HIDES)


VIEWS = {
    "itself": lambda mask: mask,
    "a batch": lambda mask: mask[None, None].expand(2, 3, -1, -1),
    "some columns": lambda mask: mask[:, :6],
    "reshaped": lambda mask: mask.view(1, 4, 8),
    "written to": lambda mask: mask.fill_(0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_sharded_rows_are_known(view):
    assert mark_of(VIEWS[view](sharded_rows())) == (-2, ((0, 4),))


OTHERS = {
    "fewer rows": lambda mask: mask[:3],
    "transposed": lambda mask: mask.mT,
    "a copy": lambda mask: mask.clone(),  # A mode follows it, and here is none.
    "flat": lambda mask: mask.view(-1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_are_not_known(other):
    assert mark_of(OTHERS[other](sharded_rows())) is None


FUNCTIONS = {
    torch.logical_not: ((), True),
    torch.Tensor.to: ((torch.float16,), True),
    torch.Tensor.__getitem__: (((slice(None), slice(6)),), True),
    torch.logical_and: ((torch.ones(1, 8, dtype=torch.bool),), True),
    torch.where: ((torch.zeros(()), torch.tensor(-torch.inf)), True),
    torch.zeros_like: ((), False),
    torch.Tensor.new_ones: (((4, 8),), False),
    torch.Tensor.flatten: ((), False),
    torch.Tensor.any: ((), False),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_computed_row_by_row_is_followed(function):
    arguments, follows = FUNCTIONS[function]
    mask = sharded_rows()
    with torch.inference_mode():  # There a view does not know its base.
        mask = mask.clone()
        mark_part(mask, 0, LAYOUT, 0)
        output = function(mask, *arguments)
        follow_parts(function, (mask, *arguments), (), output)
    assert (mark_of(output) is not None) == follows


def test_copy_has_the_mark_of_its_source():
    mask, wide = sharded_rows(), torch.zeros(2, 1, 4, 8)
    copy_mark(mask, wide)
    assert mark_of(wide) == mark_of(mask)
    copy_mark(mask, other := torch.zeros(5, 8))
    copy_mark(None, other)
    assert mark_of(other) is None


def test_marked_tensor_can_be_saved():
    file = io.BytesIO()
    torch.save(sharded_rows(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), causal_rows())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_values_tell_equal_rows_only(dtype):
    keys = torch.arange(8) < 5 if dtype == torch.bool else torch.zeros(8).masked_fill(torch.arange(8) > 4, -1e4)
    rows = keys.repeat(4, 1)
    assert bits_of(rows) == ROWS_EQUAL | HIDES
    assert bits_of(torch.ones_like(rows)) == ROWS_EQUAL
    hidden = keys[7].expand(4, 8).clone()
    assert bits_of(hidden) == HIDES  # As those of a causal mask whose first tokens are padding.
    assert bits_of(hidden[:, :4]) == ROWS_EQUAL | HIDES  # This rank's keys are padding.
    rows[2, 0] = keys[7]
    assert bits_of(rows) == HIDES  # It is read again after it was written to.
    assert bits_of(torch.ones(1, 8, dtype=dtype)) == ROWS_EQUAL
    assert bits_of(torch.ones(8, 8, dtype=dtype)) == 0  # All rows need no provenance.
    with torch.inference_mode():
        mask = rows.clone()
        assert bits_of(mask) == HIDES
        mask[2] = keys
        assert bits_of(mask) == ROWS_EQUAL | HIDES


def test_sharded_columns_are_known():
    mask = torch.ones(1, 4)
    mark_part(mask, 1, LAYOUT, 0)
    assert bits_of(mask) == COLUMNS_SHARDED | ROWS_EQUAL


def test_masks_that_cannot_be_read_pass():
    assert bits_of(causal_rows().to("meta")) == ROWS_SHARDED
    assert torch.func.vmap(lambda mask: torch.tensor(bits_of(mask)))(causal_rows()[None])[0] == ROWS_SHARDED


@pytest.mark.parametrize(
    ("bits", "rows", "refused"),
    [
        ([ROWS_SHARDED, ROWS_SHARDED], [4, 4], False),
        ([ROWS_EQUAL | HIDES, ROWS_SHARDED], [4, 4], False),
        ([ROWS_SHARDED, HIDES], [4, 4], True),
        ([0, 0], [8, 0], False),  # One rank holds all rows.
        ([0, 0], [4, 4], True),
    ],
)
def test_unknown_rows_are_refused_on_all_ranks(bits, rows, refused):
    spec = AttentionSpec(LAYOUT, LAYOUT, one_rank("cpu"), 1, 1, is_causal=False, scale=None)
    if not refused:
        check_rows(bits, rows, spec)
        return
    with pytest.raises(
        ValueError, match=r"4, 4 of 8.*on rank [01] .*cp\.shard\(mask, dim=-2\).*all rows.*propose_plan"
    ):
        check_rows(bits, rows, spec)
