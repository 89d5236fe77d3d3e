"""BlockSparseAttnMode, compared with dense attention under a mask written out for every token."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from para_core import BlockSparseAttnMode
from para_core.attention.attention_options import AttnOptions
from para_core.attention.block_sparse import BlockMask, read_block_mask
from para_core.attention.tiles import Causal
from tests.attention.cases import BALANCED, CAUSAL, IMAGE_FIRST, MESHES, TEXT_FIRST, Case, Mask, on_few_meshes
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.sparse_cases import SparseCase, check_all
from tests.attention.test_tiles import RUNS, check_tiles
from tests.rank_pool import RankPoolError


def make_blocks(case, block_size, share=0.5, seed=0):
    """Return a random block mask for ``case``."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    counts = [-(-x.shape[-2] // size) for x, size in zip(case.qkv()[:2], sizes, strict=True)]
    return torch.rand(counts, generator=torch.Generator().manual_seed(seed)) < share


def sparse_case(case, block_size, share=0.5, seed=0):
    rows, columns = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    blocks = make_blocks(case, block_size, share, seed)
    q, k, _ = case.qkv()
    visible = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: q.shape[-2], : k.shape[-2]]
    return SparseCase(case, partial(BlockSparseAttnMode, block_mask=blocks, block_size=block_size), visible)


CASES = [
    (Case(13, 4), 3),
    (Case(13, 3, options=CAUSAL), 3),
    (Case(13, 3, S_k=7, D_v=5), (4, 2)),
    (Case(13, 3, S_k=20, options=CAUSAL), (4, 3)),
    (Case(3, 1), 2),
    (Case(13, 6, H_kv=2, options={"enable_gqa": True}), 5),
    (Case(H=3, segments=TEXT_FIRST), 2),
    (Case(H=4, segments=IMAGE_FIRST, options=CAUSAL), 3),
    (Case(H=3, segments=BALANCED, options=CAUSAL), 2),
    (Case(13, 3, mask=Mask("bk")), 4),
    (Case(13, 3, mask=Mask("bhqk", torch.float32, "local"), options=CAUSAL), 4),
    (Case(13, 2), 50),  # There is a single block.
]


@pytest.mark.sample(1)
@on_few_meshes
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_block_mask_equals_dense_mask(rank_pool, ring, ulysses, share):
    items = [sparse_case(case, size, share) for case, size in CASES]
    check_all(rank_pool, items, ring, ulysses)


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_compiled_it_is_the_same(rank_pool, ring, ulysses):
    items = [sparse_case(case, size) for case, size in CASES[:8:2]]
    check_all(rank_pool, items, ring, ulysses, "aot_eager")


@st.composite
def drawn_items(draw):
    size = draw(st.integers(1, 6) | st.tuples(st.integers(1, 6), st.integers(1, 6)))
    case = Case(
        draw(st.integers(0, 20)),
        draw(st.integers(1, 4)),
        S_k=draw(st.none() | st.integers(1, 20)),
        mask=draw(st.none() | st.sampled_from([Mask("k"), Mask("bqk"), Mask("hqk", torch.float32)])),
        options=draw(st.sampled_from([{}, CAUSAL])),
    )
    return sparse_case(case, size, draw(st.sampled_from([0.1, 0.5, 0.9])), draw(st.integers(0, 99)))


# The pool outlives an example, because no state of a job is left when the next one starts.
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=settings().max_examples // 2,
)
@given(mesh=st.sampled_from(MESHES), items=st.lists(drawn_items(), min_size=1, max_size=5))
def test_any_block_mask_on_any_mesh_equals_one_device(rank_pool, mesh, items):
    check_all(rank_pool, items, *mesh)


# -- Traffic.


def count_traffic(blocks, block_size, backward):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(4, dim=2)[mesh.get_rank()].requires_grad_(backward) for x in make_qkv(16, 2, 8)]
    with BlockSparseAttnMode(mesh, blocks, block_size=block_size, assume_equal=True), CommDebugMode() as counter:
        out = F.scaled_dot_product_attention(*qkv)
        if backward:
            out.sum().backward()
    return counter.get_total_counts()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("blocks", "collectives"),
    [
        (torch.eye(4, dtype=torch.bool), 0),  # Each rank sees its own block.
        (torch.eye(4, dtype=torch.bool).roll(1, 1), 1),  # Each rank also sees the next one, which is at distance 3.
        (torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).roll(-1, 1), 1),
        (torch.ones(4, 4, dtype=torch.bool), 3),
    ],
    ids=["own", "next", "own and last", "all"],
)
def test_what_no_rank_sees_is_not_sent(rank_pool, blocks, collectives):
    assert rank_pool.run(count_traffic, 4, blocks, 4, False) == [collectives] * 4
    # In the backward pass blocks travel again, and their gradients travel back.
    assert rank_pool.run(count_traffic, 4, blocks, 4, True) == [3 * collectives] * 4


# -- One rank, and bad input.


def attend_alone():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
    with BlockSparseAttnMode(mesh, make_blocks(Case(13, 3), 4), block_size=4):
        return F.scaled_dot_product_attention(*Case(13, 3).qkv())


def test_on_one_rank_it_is_sparse_too(rank_pool):
    expected = sparse_case(Case(13, 3), 4).on_one_device()
    assert relative_error(rank_pool.run(attend_alone, 1)[0], expected) < 1e-5


def attend_with(blocks, block_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(16, 2, 8)]
    blocks = blocks[mesh.get_rank()] if isinstance(blocks, list) else blocks
    with BlockSparseAttnMode(mesh, blocks, block_size=block_size):
        F.scaled_dot_product_attention(*qkv)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("blocks", "block_size", "message"),
    [
        (torch.ones(3, 4, dtype=torch.bool), 4, r"ValueError: .*block_mask.* 3 × 4 .* 4 × 4 .* 4 × 4 "),
        (torch.ones(4, 4), 4, r"ValueError: .*block_mask.* torch\.float32 \[4, 4\].*torch\.bool"),
        (
            torch.ones(1, 4, 4, dtype=torch.bool),
            4,
            r"ValueError: .*block_mask.* torch\.bool \[1, 4, 4\].*torch\.bool",
        ),
        (torch.ones(4, 4, dtype=torch.bool), 0, "ValueError: .*block_size.* 0"),
        ("1111", 4, "TypeError: .*block_mask.* str"),
        (
            [torch.ones(4, 4, dtype=torch.bool), torch.eye(4, dtype=torch.bool)],
            4,
            "ValueError: .*ranks.* block_mask",
        ),
    ],
)
def test_bad_block_mask_raises_on_every_rank(rank_pool, blocks, block_size, message):
    with pytest.raises(RankPoolError, match=message) as error:
        rank_pool.run(attend_with, 2, blocks, block_size)
    assert "raised on 2 of 2 ranks" in str(error.value)


@given(rows=st.integers(0, 70), columns=st.integers(0, 70), share=st.sampled_from([0.1, 0.5, 0.95]))
def test_a_mask_survives_being_written_as_text(rows, columns, share):
    blocks = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) < share
    mask = read_block_mask(blocks, (3, 2))
    options = AttnOptions.of(block_mask=mask)
    assert AttnOptions.read(options.as_text()) == options
    assert isinstance(mask, BlockMask)
    for row in range(rows):
        visible = torch.zeros(columns * 2, dtype=torch.bool)
        for start, length in mask.runs_seen(row):
            visible[start : start + length] = True
        assert torch.equal(visible, blocks[row].repeat_interleave(2))


@given(queries=RUNS, keys=RUNS, seed=st.integers(0, 99), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_positional_masks_intersect(queries, keys, seed, sizes):
    shown = torch.rand(40, 40, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = ",".join(f"{sum(1 << column for column in range(40) if row[column]):x}" for row in shown.tolist())
    blocks = BlockMask(40, 40, *sizes, bits)

    def sees(query, key):
        return shown[query // sizes[0], key // sizes[1]]

    check_tiles(queries, keys, [blocks], sees)
    check_tiles(queries, keys, [Causal(), blocks], lambda query, key: (query >= key) & sees(query, key))
