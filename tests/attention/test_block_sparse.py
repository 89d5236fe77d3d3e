"""BlockSparseAttnMode, compared with dense attention under a mask written out for every token."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from para_core import BlockSparseAttnMode
from para_core.option_values import ROTATE_METHODS
from tests.attention.cases import (
    BALANCED,
    CAUSAL,
    IMAGE_FIRST,
    MESHES,
    TEXT_FIRST,
    Case,
    Mask,
    check_all,
    cpu_mesh,
    own_attention,
)
from tests.attention.one_device import make_qkv
from tests.attention.test_traffic import Traffic


def sparse(case, block_size, share=0.4, seed=0):
    """Return ``case`` with a random block mask."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    lengths = [x.shape[-2] for x in case.qkv()[:2]]
    counts = [-(-length // size) for length, size in zip(lengths, sizes, strict=True)]
    blocks = torch.rand(counts, generator=torch.Generator().manual_seed(seed)) < share
    visible = blocks.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: lengths[0], : lengths[1]]
    return replace(case, mode=partial(BlockSparseAttnMode, block_mask=blocks, block_size=block_size), visible=visible)


CASES = [
    (Case(13, 4), 3),
    (Case(13, 3, dtype=torch.bfloat16), 3),
    (Case(13, 3, options=CAUSAL), 3),
    (Case(13, 3, S_k=7, D_v=5), (4, 2)),
    (Case(13, 3, S_k=20, options=CAUSAL), (4, 3)),
    (Case(3, 1), 2),
    (Case(13, 6, H_kv=2, options={"enable_gqa": True}), 5),
    (Case(H=3, segments=TEXT_FIRST), 2),
    (Case(H=4, segments=IMAGE_FIRST, options=CAUSAL), 3),
    (Case(H=3, segments=BALANCED, options=CAUSAL), 2),
    (Case(12, 2, key_segments=(("text", 12, True),)), 3),
    (Case(13, 3, mask=Mask("bhqk", torch.float32, "local", share=0.9, low=(-1e9, *Mask.low)), options=CAUSAL), 4),
    (Case(13, 2), 50),  # There is a single block.
]


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("ring", "ulysses", "share", "options"),
    [
        (1, 1, 0.4, {}),
        (3, 1, 0.4, {}),
        (2, 2, 0.4, {"rotate_method": "gathered"}),
        (1, 3, 0.0, {}),
        (2, 1, 0.4, {"attn_func": own_attention}),
    ],
)
def test_block_mask_equals_dense_mask(rank_pool, ring, ulysses, share, options, learns):
    # Gradients are compared within the rounding of float32.
    cases = [sparse(*case, share) for case in CASES if not learns or case[0].dtype == torch.float32]
    check_all(rank_pool, cases, ring, ulysses, learns=learns, **options)


def test_block_mask_in_one_graph(rank_pool):
    check_all(rank_pool, [sparse(*CASES[7])], 2, 1, learns=True, compile_with="aot_eager")


@st.composite
def drawn_cases(draw):
    size = draw(st.integers(1, 6) | st.tuples(st.integers(1, 6), st.integers(1, 6)))
    case = Case(
        draw(st.integers(1, 20)),
        draw(st.integers(1, 4)),
        S_k=draw(st.none() | st.integers(1, 20)),
        mask=draw(st.none() | st.sampled_from([Mask("k"), Mask("bqk"), Mask("hqk", torch.float32)])),
        options=draw(st.sampled_from([{}, CAUSAL])),
    )
    return sparse(case, size, draw(st.sampled_from([0.1, 0.5, 0.9])), draw(st.integers(0, 99)))


# The pool outlives an example, because no state of a job is left when the next one starts.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    mesh=st.sampled_from(MESHES),
    method=st.sampled_from(ROTATE_METHODS),
    learns=st.booleans(),
    cases=st.lists(drawn_cases(), min_size=1, max_size=5),
)
def test_any_block_mask_on_any_mesh_equals_one_device(rank_pool, mesh, method, learns, cases):
    check_all(rank_pool, cases, *mesh, learns=learns, rotate_method=method)


EYE, ALL = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
EVERY = [True] * 4
# Block masks, and for each hop whether each rank sends its block. The next rank is at distance 3.
HOPS = [
    (EYE, []),
    (EYE.roll(1, 1), [EVERY]),
    (EYE | EYE.roll(-1, 1), [EVERY]),
    (EYE | (torch.arange(16) == 3).view(4, 4), [[False, False, False, True]]),
    (ALL, [EVERY] * 3),
]


def count_traffic(backward):
    mesh, sent = cpu_mesh(4, 1), []
    qkv = [x.chunk(4, dim=2)[mesh.get_rank()].requires_grad_(backward) for x in make_qkv(16, 2, 8)]
    for blocks, _ in HOPS:
        with BlockSparseAttnMode(mesh, blocks, block_size=4, assume_equal=True), Traffic() as traffic:
            out = F.scaled_dot_product_attention(*qkv)
            if backward:
                out.sum().backward()
        assert not traffic.gathered + traffic.others
        sent.append(traffic.sent)
    return sent


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_sends_the_documented_bytes(rank_pool, backward):
    block = make_qkv(4, 2, 8)[0].nbytes * 2
    for rank, sent in enumerate(rank_pool.run(count_traffic, 4, backward)):
        for (_, hops), of_hops in zip(HOPS, sent, strict=True):
            assert of_hops[: len(hops)] == [block * senders[rank] for senders in hops]
            # In the backward pass blocks travel again, and their gradients travel back.
            assert len(of_hops) == len(hops) * (3 if backward else 1)


REFUSED = [
    (torch.ones(3, 4, dtype=torch.bool), 4, r"block_mask.* 3 × 4 .* 4 × 4 .* 4 × 4 "),
    (torch.ones(4, 4), 4, r"block_mask.* torch\.float32 \[4, 4\].*torch\.bool"),
    (ALL[None], 4, r"block_mask.* torch\.bool \[1, 4, 4\].*torch\.bool"),
    (ALL.to_sparse(), 4, "block_mask.* sparse"),
    (ALL, 0, r"block_size.* 0"),
    ("1111", 4, r"block_mask.* str"),
    ([ALL, EYE], 4, r"ranks.* block_mask"),
]


def attend_badly():
    mesh = cpu_mesh(2, 1)
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(16, 2, 8)]
    for of_ranks, size, message in REFUSED:
        blocks = of_ranks[mesh.get_rank()] if isinstance(of_ranks, list) else of_ranks
        with pytest.raises((TypeError, ValueError), match=message), BlockSparseAttnMode(mesh, blocks, block_size=size):
            F.scaled_dot_product_attention(*qkv)


def test_bad_block_mask_raises_on_every_rank(rank_pool):
    rank_pool.run(attend_badly, 2)
