"""Gradients over every mesh, compared with those of unmodified SDPA on one device, for the sum of all ranks' losses."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention import operator
from para_core.attention.ring import Ring
from tests.attention.cases import (
    BALANCED,
    CAUSAL,
    GQA,
    IMAGE_FIRST,
    MESHES,
    TEXT_FIRST,
    Case,
    Mask,
    gradients,
    gradients_on_one_device,
    on_few_meshes,
    on_most_meshes,
    put_gradients_together,
)
from tests.attention.test_exactness import drawn_cases
from tests.pairwise import pairwise


def check_all(rank_pool, cases, ring, ulysses, compile_with=None, mode_options=None):
    ranks = ring * ulysses
    of_ranks = zip(*rank_pool.run(gradients, ranks, cases, ring, ulysses, compile_with, mode_options), strict=True)
    for case, parts_of_ranks in zip(cases, of_ranks, strict=True):
        expected = gradients_on_one_device(case, ranks)
        whole = put_gradients_together(case, parts_of_ranks)
        # If softmax is constant (one key, or the same bias for all keys), gradients are rounding errors of 0.
        scale = expected[2].norm()
        assert len(whole) == len(expected)
        for name, gradient, reference in zip(("query", "key", "value", "mask"), whole, expected, strict=False):
            where = f"{name} of {case} on ring {ring} × ulysses {ulysses}"
            assert gradient.shape == reference.shape, where
            assert (gradient - reference).norm() <= 1e-5 * max(scale, reference.norm()), where


@pytest.mark.sample(3)
@on_most_meshes
def test_self_attention(rank_pool, ring, ulysses):
    cases = [
        Case(S, H, D, options=options)
        for S, H, D in [(13, 6, 8), (3, 3, 5), (16, 1, 16), (1, 2, 8)]
        for options in ({}, CAUSAL, {"scale": 0.4})
    ]
    check_all(rank_pool, cases, ring, ulysses)


@pytest.mark.sample(3)
@on_most_meshes
def test_grouped_heads_other_lengths_and_other_widths(rank_pool, ring, ulysses):
    cases = [
        *[
            Case(13, H, H_kv=H_kv, options=GQA | causal)
            for H, H_kv in [(6, 2), (4, 1), (6, 3)]
            for causal in ({}, CAUSAL)
        ],
        *[
            Case(13, 3, S_k=S_k, D_v=D_v, options=causal)
            for S_k in (5, 20)
            for D_v in (None, 3)
            for causal in ({}, CAUSAL)
        ],
    ]
    check_all(rank_pool, cases, ring, ulysses)


@pytest.mark.sample(3)
@on_most_meshes
def test_replicated_and_balanced_segments(rank_pool, ring, ulysses):
    layouts = [TEXT_FIRST, IMAGE_FIRST, BALANCED, (("text", 3, True), ("image", 9, False), ("more", 2, True))]
    cases = [
        Case(H=H, segments=segments, options=causal) for segments in layouts for H in (4, 3) for causal in ({}, CAUSAL)
    ]
    cases += [
        Case(H=3, segments=IMAGE_FIRST, key_segments=(("text", 5, True),), options=causal) for causal in ({}, CAUSAL)
    ]
    check_all(rank_pool, cases, ring, ulysses)


@pytest.mark.sample(3)
@on_few_meshes
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_and_the_gradient_of_additive_ones(rank_pool, ring, ulysses, dtype):
    extents = [("global", "global"), ("local", "global"), ("global", "local")]
    cases = [
        Case(13, 4, segments=segments, mask=Mask(dims, dtype, *extent), options=causal)
        for dims, extent, segments, causal in pairwise(
            ("qk", "bk", "bhqk", "hqk", ""), extents, (None, IMAGE_FIRST), ({}, CAUSAL)
        )
    ]
    check_all(rank_pool, cases, ring, ulysses)


def test_rows_that_see_no_key_have_no_gradient(rank_pool):
    cases = [Case(13, 3, mask=Mask("qk", dtype, share=1.0)) for dtype in (torch.bool, torch.float32)]
    for ring, ulysses in ((2, 1), (1, 2)):
        for results in rank_pool.run(gradients, 2, cases, ring, ulysses):
            assert all(not grad.any() for grads in results for grad in grads)


float32_cases = drawn_cases().filter(lambda case: case.dtype == torch.float32)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
@given(mesh=st.sampled_from(MESHES), cases=st.lists(float32_cases, min_size=1, max_size=5))
def test_any_attention_on_any_mesh(rank_pool, mesh, cases):
    check_all(rank_pool, cases, *mesh)


COMPILED = [
    Case(13, 4),
    Case(13, 3, options=CAUSAL),
    Case(5, 1, options=CAUSAL),  # One rank has no heads, and one has a single token.
    Case(1, 2),  # One rank has no tokens.
    Case(13, 6, H_kv=2, options=GQA),
    Case(H=4, segments=TEXT_FIRST, mask=Mask("bk", torch.float32)),
    Case(H=3, segments=BALANCED, mask=Mask("bhqk", torch.float32, "local"), options=CAUSAL),
    Case(13, 3, S_k=9, mask=Mask("qk", torch.bool, "global", "local")),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ring", "ulysses", "cases"),
    [
        (2, 2, COMPILED),
        (2, 1, COMPILED),
        (1, 3, COMPILED),
    ],
)
def test_in_one_compiled_graph(rank_pool, ring, ulysses, cases):
    check_all(rank_pool, cases, ring, ulysses, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_with_inductor(rank_pool, ring, ulysses):
    check_all(rank_pool, COMPILED[2:4], ring, ulysses, "inductor")


@pytest.mark.parametrize("missing", ["all", "that of the ring"])
def test_missing_feature_for_gradients_is_refused(monkeypatch, missing):
    """Inference works without it, and a call that requires a gradient says what is missing."""
    if missing == "all":
        monkeypatch.setattr(operator, "_DIFFERENTIATE", [])
    else:
        monkeypatch.setattr(Ring, "gradient", "gradients.missing:ring_backward")
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    with fake_group(2):
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
        with UnifiedAttnMode(mesh, assume_equal=True):
            with torch.no_grad():
                assert F.scaled_dot_product_attention(query, query, query).shape == query.shape
            with pytest.raises(RuntimeError, match="requires a gradient"):
                F.scaled_dot_product_attention(query, query, query)
