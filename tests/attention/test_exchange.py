"""The exchange packs all peers and tensors in one launch, as on a GPU. The tests run the operators' form for CPUs."""

from unittest import mock

import pytest
import torch

from para_core.attention import transfer
from para_core.kernels import pack_reference
from tests.attention.cases import (
    IMAGE_FIRST,
    TEXT_FIRST,
    Case,
    Mask,
    attend,
    gradients,
    gradients_on_one_device,
    put_gradients_together,
)
from tests.attention.test_exactness import check

CASES = [
    Case(16, 4),
    Case(13, 3),
    Case(3, 1),  # Some ranks have no tokens, and some no heads.
    Case(13, 5, D=3, D_v=7),
    Case(9, 4, S_k=5, mask=Mask("k")),
    Case(13, 6, H_kv=2, options={"enable_gqa": True}),
    Case(13, 3, H_kv=1, options={"enable_gqa": True, "is_causal": True}),
    Case(H=3, segments=TEXT_FIRST),
    Case(H=5, segments=IMAGE_FIRST, dtype=torch.bfloat16),
    Case(0, 2),
    Case(13, 2, B=0),
]


def as_on_gpu(function, cases, ring, ulysses, *options):
    """Return the result of ``function``, and how often one launch packed and unpacked."""
    with (
        mock.patch.object(transfer, "takes_kernels", lambda _: not torch.is_grad_enabled()),
        mock.patch.object(pack_reference, "pack", wraps=pack_reference.pack) as pack,
        mock.patch.object(pack_reference, "unpack", wraps=pack_reference.unpack) as unpack,
    ):
        return function(cases, ring, ulysses, *options), pack.call_count, unpack.call_count


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 4), (2, 2)])
def test_exchange_of_any_tokens_and_heads_equals_one_device(rank_pool, ring, ulysses):
    results = rank_pool.run(as_on_gpu, ring * ulysses, attend, CASES, ring, ulysses)
    for rank, (outs, packs, unpacks) in enumerate(results):
        assert packs >= len(CASES)
        assert unpacks > 0
        for case, out in zip(CASES, outs, strict=True):
            check(case, out, f"ring {ring} × ulysses {ulysses}, rank {rank}")


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2)])
def test_its_gradients_equal_those_of_one_device(rank_pool, ring, ulysses):
    sizes = [Case(13, 3), Case(16, 4), Case(13, 5, D_v=3), Case(H=3, segments=TEXT_FIRST)]
    cases = [
        *sizes,
        Case(13, 6, H_kv=2, options={"enable_gqa": True}),
        Case(13, 4, H_kv=1, options={"enable_gqa": True}),
    ]
    results = rank_pool.run(as_on_gpu, ring * ulysses, gradients, cases, ring, ulysses)
    assert all(packs > len(cases) for _, packs, _ in results)
    for case, parts in zip(cases, zip(*[of_rank for of_rank, _, _ in results], strict=True), strict=True):
        expected = gradients_on_one_device(case, ring * ulysses)
        for gradient, reference in zip(put_gradients_together(case, parts), expected, strict=True):
            assert (gradient - reference).norm() <= 1e-5 * max(expected[2].norm(), reference.norm()), case
