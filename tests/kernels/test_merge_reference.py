"""merge() is compared with softmax over the union of the keys, in float64."""

import doctest
from importlib import import_module

import pytest
import torch
from torch import Tensor

from para_core.kernels.merge_reference import merge

B, H, D = 2, 3, 8


def attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention by its formula. A row whose scores are all -inf, or that has no key, gives 0 and -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return probs @ v, lse


def two_sides(S_q: int, S_a: int, S_b: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scores ``[B, H, S_q, S_a + S_b]`` and values, float64. Row 0 sees no key, row 1 only keys of a, row 2 only
    keys of b.
    """
    generator = torch.Generator().manual_seed(S_q + S_a + S_b)
    scores = scale * torch.randn(B, H, S_q, S_a + S_b, generator=generator, dtype=torch.float64)
    v = torch.randn(B, H, S_a + S_b, D, generator=generator, dtype=torch.float64)
    for row, hidden in enumerate([slice(None), slice(S_a, None), slice(0, S_a)][:S_q]):
        scores[:, :, row, hidden] = float("-inf")
    return scores, v


def relative_error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm().clamp_min(1e-300))


@pytest.mark.parametrize(("S_q", "S_a", "S_b"), [(7, 5, 3), (4, 0, 6), (4, 6, 0), (1, 1, 1), (0, 4, 4), (64, 33, 31)])
def test_merging_two_sides_equals_attention_over_the_union(S_q, S_a, S_b):
    scores, v = two_sides(S_q, S_a, S_b)
    expected_out, expected_lse = attend(scores, v)

    out, lse = merge(*attend(scores[..., :S_a], v[..., :S_a, :]), *attend(scores[..., S_a:], v[..., S_a:, :]))

    # Everything is float64, so only the order of the sums differs.
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_row_without_keys_gives_zero_and_minus_infinity():
    scores, v = two_sides(4, 5, 3)
    out, lse = merge(*attend(scores[..., :5], v[..., :5, :]), *attend(scores[..., 5:], v[..., 5:, :]))
    assert torch.equal(out[:, :, 0], torch.zeros(B, H, D, dtype=torch.float64))
    assert torch.equal(lse[:, :, 0], torch.full((B, H), float("-inf"), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(dtype):
    scores, v = two_sides(16, 9, 8)
    (out_a, lse_a), (out_b, lse_b) = attend(scores[..., :9], v[..., :9, :]), attend(scores[..., 9:], v[..., 9:, :])
    rounded = [out_a.to(dtype), lse_a.float(), out_b.to(dtype), lse_b.float()]
    exact, _ = merge(*(x.double() for x in rounded))

    out, lse = merge(*rounded)

    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # One rounding to the output's dtype is at most eps / 2 per element. The float32 sum adds a few float32 eps.
    assert relative_error(out, exact) <= torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps


def test_scores_far_apart_do_not_overflow():
    scores, v = two_sides(6, 4, 4, scale=1e4)
    expected_out, expected_lse = attend(scores, v)
    sides = (*attend(scores[..., :4], v[..., :4, :]), *attend(scores[..., 4:], v[..., 4:, :]))
    out, lse = merge(*(x.float() for x in sides))
    assert relative_error(out, expected_out) < 1e-6
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0.0)


def test_merging_is_the_same_in_every_order():
    scores, v = two_sides(5, 4, 8)
    a, b, c = (attend(scores[..., s], v[..., s, :]) for s in (slice(0, 4), slice(4, 7), slice(7, None)))
    left = merge(*merge(*a, *b), *c)
    right = merge(*a, *merge(*c, *b))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_gradients_equal_attention_over_the_union():
    scores, v = two_sides(5, 4, 3)
    out_weight = torch.randn(B, H, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # lse is -inf in row 0, so no gradient comes from there.
    lse_weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * out_weight).sum() + (lse[:, :, 1:] * lse_weight[1:]).sum()

    sides = [*attend(scores[..., :4], v[..., :4, :]), *attend(scores[..., 4:], v[..., 4:, :])]
    sides = [x.requires_grad_() for x in sides]
    loss(*merge(*sides)).backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in sides)

    # Row by row, the (out, lse) of each side enters the union as one key with score lse and value out.
    as_keys = [x.detach().clone().requires_grad_() for x in sides]
    out_a, lse_a, out_b, lse_b = as_keys
    for row in range(1, 5):
        score = torch.stack([lse_a[:, :, row], lse_b[:, :, row]], dim=-1)
        value = torch.stack([out_a[:, :, row], out_b[:, :, row]], dim=-2)
        out = (torch.softmax(score, dim=-1)[..., None] * value).sum(-2)
        lse = torch.logsumexp(score, dim=-1)
        ((out * out_weight[:, :, row]).sum() + (lse * lse_weight[row]).sum()).backward()
    for got, expected in zip(sides, as_keys, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_the_doctest_of_merge_holds():
    # Use the import name: pytest would import kernels/ a second time under another name.
    result = doctest.testmod(import_module("para_core.kernels.merge_reference"))
    assert result.attempted > 0
    assert result.failed == 0
