"""Ownership of a mask's rows is inferred from its values, and all ranks reach one verdict. These tests need no
ranks.
"""

import pytest
import torch

from para_core.attention.mask_checks import MaskReviews, Review, check_own_rows, num_common_rows
from para_core.layout.sequence import Segment, SequenceLayout


def causal(rows, total, first=0, window=None, left=0, valid=None):
    """Return rows ``first``, ``first + 1``, … of a causal mask, bool ``[1, 1, rows, total]``."""
    i, j = torch.arange(first, first + rows)[:, None], torch.arange(total)[None]
    mask = (j <= i) & (j >= left) & (j < (total if valid is None else valid))
    return (mask if window is None else mask & (j > i - window))[None, None]


def additive(mask, dtype, hidden):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def as_is(mask):
    return mask


FORMS = {
    "bool": as_is,
    "-inf": lambda mask: additive(mask, torch.float32, float("-inf")),
    "float16": lambda mask: additive(mask, torch.float16, torch.finfo(torch.float16).min),
    "bfloat16": lambda mask: additive(mask, torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "-10000": lambda mask: additive(mask, torch.bfloat16, -10000.0),
    # In older versions of transformers, rows that see no key see every key.
    "unmasked": lambda mask: mask | ~mask.any(-1, keepdim=True),
}


def verdict(masks, layout, is_causal=False):
    reviews, num_common = MaskReviews(), num_common_rows(layout)
    check_own_rows([reviews.of(mask, num_common) for mask in masks], layout, is_causal=is_causal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"left": 2}, {"valid": 5}, {"window": 3, "left": 1}], ids=str)
@pytest.mark.parametrize(
    ("total", "ranks", "balanced"), [(16, 2, False), (13, 2, False), (13, 4, False), (13, 2, True)]
)
def test_rows_counted_from_zero_are_detected(form, options, total, ranks, balanced):
    layout = SequenceLayout((Segment("x", total, balanced=balanced),), ranks)
    whole = causal(total, total, **options)
    own = [
        torch.cat([whole[:, :, start : start + length] for start, length in layout.runs(rank)], dim=2)
        for rank in range(ranks)
    ]
    verdict([FORMS[form](mask) for mask in own], layout)
    local = [causal(size, total, **options) for size in layout.sizes()]
    with pytest.raises(ValueError, match=r"cp\.shard"):
        verdict([FORMS[form](mask) for mask in local], layout)


def test_single_causal_rows_counted_from_zero_are_detected():
    layout = SequenceLayout((Segment("x", 3),), 3)
    for valid in (None, 2):
        verdict([causal(1, 3, rank, valid=valid) for rank in range(3)], layout, is_causal=True)
        with pytest.raises(ValueError, match=r"cp\.shard"):
            verdict([causal(1, 3, valid=valid) for _ in range(3)], layout, is_causal=True)
    verdict([causal(1, 3) for _ in range(3)], layout)  # Two keys of an encoder are padding.


def band(rows, total, window, first=0, valid=None):
    """Return rows ``first``, ``first + 1``, … of a mask with a window to both sides, bool ``[1, 1, rows, total]``."""
    i, j = torch.arange(first, first + rows)[:, None], torch.arange(total)[None]
    return (((i - j).abs() <= window) & (j < (total if valid is None else valid)))[None, None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("valid", [None, 11])
@pytest.mark.parametrize(("total", "ranks"), [(16, 2), (13, 2), (14, 3), (3, 2), (70, 2)])
def test_window_rows_counted_from_zero_are_detected(form, window, valid, total, ranks):
    layout = SequenceLayout((Segment("x", total),), ranks)
    starts = [layout.runs(rank)[0] for rank in range(ranks)]
    verdict([FORMS[form](band(size, total, window, start, valid)) for start, size in starts], layout)
    local = [FORMS[form](band(size, total, window, valid=valid)) for size in layout.sizes()]
    if window >= total - 1:
        verdict(local, layout)  # Every row sees all keys.
        return
    with pytest.raises(ValueError, match=r"cp\.shard"):
        verdict(local, layout)


def test_equal_rows_of_two_segments_pass():
    text, image = torch.arange(12) < 4, torch.ones(12, dtype=torch.bool)
    rows = torch.stack([text] * 2 + [image] * 4)[None, None]  # Text does not see the image.
    verdict([rows, rows.clone()], SequenceLayout((Segment("text", 4), Segment("image", 8)), 2))


def test_a_mask_that_is_not_causal_passes():
    layout = SequenceLayout((Segment("x", 12),), 2)
    padding = (torch.arange(12) < 9).expand(1, 1, 6, 12)
    documents = torch.arange(12) // 4
    blocks = documents[:, None] == documents[None]
    for masks in (
        [padding.clone(), padding.clone()],
        [blocks[None, None, :6], blocks[None, None, 6:]],
        # The second half is padding: its rows see no key, or the first key only.
        [causal(6, 12), torch.zeros(1, 1, 6, 12, dtype=torch.bool)],
        [causal(6, 12), (torch.arange(12) < 1).expand(1, 1, 6, 12)],
        # Queries 5 to 8 are padding, and the others see all keys.
        [(torch.arange(6) < 5)[:, None].expand(1, 1, 6, 12), (torch.arange(6) > 2)[:, None].expand(1, 1, 6, 12)],
        [(torch.arange(6) < 5)[:, None].expand(1, 1, 6, 12)] * 2,
        [torch.zeros(1, 1, 6, 12, dtype=torch.bool)] * 2,
    ):
        verdict(masks, layout)
    with pytest.raises(ValueError, match=r"cp\.shard"):
        verdict(masks, layout, is_causal=True)  # No query of a causal model sees a key.


def test_mask_is_read_again_only_after_writing():
    reviews, mask = MaskReviews(), causal(4, 8)
    first = reviews.of(mask, 4)
    assert reviews.of(mask[:, :, :, :], 4) == first  # Each layer takes such a view.
    mask[..., -1] = True
    assert reviews.of(mask, 4) != first
    reviews.trust(mask)
    other = causal(4, 8)
    assert reviews.of(other, 4) == first
    with torch.inference_mode():  # Tensors of inference mode do not count writes.
        mask = causal(4, 8)
        assert reviews.of(mask, 4) == first
        mask[..., -1] = True
        assert reviews.of(mask, 4) != first
        reviews.trust(mask)
        assert reviews.of(mask, 4) == Review()
