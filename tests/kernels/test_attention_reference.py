"""The contract of attention, compared with its formula in float64, and with SDPA where it promises equality."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from para_core.kernels.attention_reference import attention, pack_bits, ranges_of_lengths, unpack_bits
from tests.kernels.attention_cases import OPTIONS, by_formula, check_lse, error, make


@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_reference_equals_the_formula(kind, key_heads):
    tensors = make(18, 21, key_heads=key_heads, value_dim=24)
    out, lse = attention(*tensors, **OPTIONS[kind])
    exact_out, exact_lse = by_formula(*tensors, **OPTIONS[kind])
    assert error(out, exact_out) < 1e-6
    if "finfo" in kind:
        assert torch.equal(lse > -torch.inf, exact_lse > -torch.inf)
    else:
        check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("kind", ["plain", "bool mask", "causal, earlier queries", "padded segments"])
def test_continuing_equals_all_keys_at_once(kind):
    query, key, value = make(18, 21)
    more_key, more_value = make(18, 9)[1:]
    options = OPTIONS[kind]
    out, lse = attention(query, key, value, **options, so_far=attention(query, more_key, more_value))
    scores = [by_formula(query, key, value, **options), by_formula(query, more_key, more_value)]
    exact_lse = torch.logaddexp(scores[0][1], scores[1][1])
    exact = sum(out_part * torch.exp(lse_part - exact_lse)[..., None] for out_part, lse_part in scores)
    assert error(out, exact) < 1e-6
    check_lse(lse, exact_lse, 1e-5)


@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 64, 70])
def test_bits_are_a_bool_mask_in_an_eighth(num_keys):
    mask = torch.rand(2, 1, 3, num_keys, generator=torch.Generator().manual_seed(num_keys)) > 0.5
    words = pack_bits(mask)
    assert words.shape == (2, 1, 3, -(-num_keys // 32)) and words.dtype == torch.int32
    for key in range(num_keys):
        assert torch.equal((words[..., key // 32] >> key % 32 & 1).bool(), mask[..., key])
    assert torch.equal(unpack_bits(words, num_keys), mask)
    tensors = make(3, num_keys)
    assert torch.equal(attention(*tensors, mask=words)[0], attention(*tensors, mask=mask)[0])


def test_row_of_finfo_min_equals_sdpa():
    tensors, mask = make(18, 21), OPTIONS["finfo.min"]["mask"]
    out, _ = attention(*tensors, mask=mask)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert error(out[:, :, :5], expected[:, :, :5].double()) < 1e-6


def test_the_result_lies_in_memory_as_sdpas_does():
    out, _ = attention(*make(18, 21), out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.transpose(1, 2).view(2, 18, -1)


def test_lengths_of_another_number_of_segments_are_an_error():
    with pytest.raises(ValueError, match=r"lengths .*\[2, 2\] .*3 segments"):
        ranges_of_lengths(torch.tensor([[1, 2], [3, 4]]), [5, 5, 5])


def test_the_doctests_hold():
    result = doctest.testmod(import_module("para_core.kernels.attention_reference"), extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
