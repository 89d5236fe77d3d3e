"""Tensors are sent in 8 bits, which is half the bytes of 16 bits, with a bounded error."""

import pytest
import torch
import torch.nn.functional as F

import para_core
from para_core import UnifiedAttnMode
from para_core.attention.attention_options import AttnOptions
from tests.attention.cases import FEW_CALLS, IMAGE_FIRST, Case, attend, cpu_mesh
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_traffic import Traffic
from tests.launches import count_attention

# float8 has 4 significant bits: an element is off by up to 1/16 of itself, and by 2.6 % in the mean of squares. A row
# of scores multiplies two such tensors, and values and out are rounded too. int8 is off by up to a 254th of the largest
# element of its token.
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
BOUNDS = {FLOAT8: 0.08, INT8: 0.025}

CASES = [
    *FEW_CALLS,
    Case(13, 4, D=3, D_v=2),
    Case(13, 3, S_k=7, D_v=5, options={"is_causal": True}),
    Case(H=4, segments=IMAGE_FIRST, dtype=torch.bfloat16),
]


def in_sparse_modes(ring):
    """Return pairs of results, exact and near ones, of modes that leave out keys."""
    mesh, pairs = cpu_mesh(ring, 2 // ring), []
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(16, 4, 8)]
    blocks = {"block_mask": torch.ones(4, 4).triu(-1).bool(), "block_size": 4}
    for name, kept in (("SparseKVAttnMode", {"share": 0.5, "window": 16}), ("BlockSparseAttnMode", blocks)):
        for dtype in (None, FLOAT8):
            with torch.no_grad(), getattr(para_core, name)(mesh, comm_dtype=dtype, **kept):
                pairs.append(F.scaled_dot_product_attention(*qkv))
    return pairs


@pytest.mark.parametrize("ring", [1, 2])
def test_keys_that_are_left_out_are_not_rounded_in(rank_pool, ring):
    for exact, near, exact_blocks, near_blocks in rank_pool.run(in_sparse_modes, 2, ring):
        # Rounded keys may be kept although exact ones would not be.
        assert 1e-5 < relative_error(near, exact) < 0.5
        assert 1e-5 < relative_error(near_blocks, exact_blocks) < BOUNDS[FLOAT8]


@pytest.mark.parametrize(("ring", "ulysses", "dtype"), [(3, 1, FLOAT8), (1, 3, INT8), (2, 2, INT8)])
def test_it_is_as_near_as_8_bits_are(rank_pool, ring, ulysses, dtype):
    options = {"comm_dtype": dtype}
    for outs in rank_pool.run(attend, ring * ulysses, CASES, ring, ulysses, False, None, options):
        for case, (out, _) in zip(CASES, outs, strict=True):
            error = relative_error(out, case.on_one_device())
            assert error < BOUNDS[dtype], f"{case}: {error}"
            assert error > 1e-5 or out.numel() == 0 or case.S <= 3 or case.key_segments, f"{case}: nothing was rounded"


def test_gradients_are_exact_and_a_graph_rounds_as_eager_code(rank_pool):
    def run(options, learns=False, compile_with=None):
        return rank_pool.run(attend, 2, [CASES[0]], 1, 2, learns, compile_with, options)

    options = {"comm_dtype": FLOAT8}
    for rounded, exact in zip(run(options, True), run({}, True), strict=True):
        assert all(torch.equal(*pair) for pair in zip(rounded[0][1], exact[0][1], strict=True))
    for rounded, eager in zip(run(options, compile_with="aot_eager"), run(options), strict=True):
        assert relative_error(rounded[0][0], eager[0][0]) < 1e-6


def count_bytes(dtype):
    mesh = cpu_mesh(2, 2)
    qkv = [x.bfloat16().tensor_split(4, dim=2)[mesh.get_rank()] for x in make_qkv(64, 4, 16, B=2)]
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True, comm_dtype=dtype), Traffic() as traffic:
        F.scaled_dot_product_attention(*qkv)
    return traffic.sent


def test_wire_sends_one_byte_per_element_and_scales(rank_pool):
    for whole, half in zip(rank_pool.run(count_bytes, 4, None), rank_pool.run(count_bytes, 4, FLOAT8), strict=True):
        assert half == [bytes_before * (16 + 4) // (2 * 16) for bytes_before in whole]


@pytest.mark.parametrize("ranks", [2, 8])
def test_rounded_calls_with_kernels_launch_few_more(ranks):
    counter = count_attention(1, ranks, tokens=291, heads=25, device="meta", comm_dtype=FLOAT8)
    kernels = {name: number for name, number in counter.by_operator.items() if name.startswith("para_core")}
    assert kernels == {"para_core::pack": 2, "para_core::unpack": 2}
    assert counter.launches == 7, str(counter)
    whole, half = (count_attention(ranks, 1, device="meta", backend="triton", comm_dtype=x) for x in (None, FLOAT8))
    assert half.launches == whole.launches + ranks - 1, str(half)


@pytest.mark.parametrize("dtype", [FLOAT8, INT8])
def test_options_survive_their_json_and_lose_the_dtype_for_gradients(dtype):
    rounded = AttnOptions.of(rotate_method="allgather", comm_dtype=dtype)
    assert AttnOptions.read(rounded.as_text()) == rounded
    assert rounded.with_gradients == AttnOptions(rotate_method="allgather")
    assert rounded.records["comm_dtype"] == str(dtype)
