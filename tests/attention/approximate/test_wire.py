"""Tensors are sent in 8 bits, which is half the bytes of 16 bits, with a bounded error."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import para_core
from para_core import UnifiedAttnMode
from para_core.attention.attention_options import AttnOptions
from tests.attention.cases import IMAGE_FIRST, TEXT_FIRST, Case, Mask, attend, on_most_meshes
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_traffic import Traffic
from tests.launches import count_attention
from tests.rank_pool import RankPoolError

FP8, INT8 = {"comm_dtype": torch.float8_e4m3fn}, {"comm_dtype": torch.int8}
# float8 has 4 significant bits: an element is off by up to 1/16 of itself, and by 2.6 % in the mean of squares. A row
# of scores multiplies two such tensors, and values and out are rounded too. int8 is off by up to a 254th of the largest
# element of its token.
BOUNDS = {torch.float8_e4m3fn: 0.08, torch.int8: 0.025}
BOUND = BOUNDS[torch.float8_e4m3fn]

CASES = [
    Case(13, 4),
    Case(13, 4, D=3, D_v=2),
    Case(13, 3, S_k=7, D_v=5, options={"is_causal": True}),
    Case(3, 1),
    Case(13, 6, H_kv=2, options={"enable_gqa": True}),
    Case(H=3, segments=TEXT_FIRST),
    Case(H=4, segments=IMAGE_FIRST, dtype=torch.bfloat16),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("text", 5, True),)),
    Case(13, 3, mask=Mask("bk")),
    Case(0, 2),
    Case(13, 2, B=0),
]


@pytest.mark.sample(2)
@on_most_meshes
@pytest.mark.parametrize("options", [FP8, INT8], ids=["float8", "int8"])
def test_it_is_as_near_as_8_bits_are(rank_pool, ring, ulysses, options):
    for outs in rank_pool.run(attend, ring * ulysses, CASES, ring, ulysses, None, options):
        for case, out in zip(CASES, outs, strict=True):
            error = relative_error(out, case.on_one_device())
            assert error < BOUNDS[options["comm_dtype"]], f"{case}: {error}"
            assert error > 1e-5 or out.numel() == 0 or case.S <= 3 or case.key_segments, f"{case}: nothing was rounded"


@pytest.mark.long
def test_compiled_it_is_the_same(rank_pool):
    for compiled, eager in zip(
        rank_pool.run(attend, 4, CASES[:6:5], 2, 2, "aot_eager", FP8),
        rank_pool.run(attend, 4, CASES[:6:5], 2, 2, None, FP8),
        strict=True,
    ):
        for out, expected in zip(compiled, eager, strict=True):
            assert relative_error(out, expected) < 1e-6


def with_sparse_modes(ring):
    mesh = init_device_mesh("cpu", (ring, 2 // ring), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(16, 4, 8)]
    pairs = []
    for make in (
        lambda **options: para_core.SparseKVAttnMode(mesh, share=0.5, window=16, **options),
        lambda **options: para_core.BlockSparseAttnMode(
            mesh, torch.ones(4, 4).triu(-1).bool(), block_size=4, **options
        ),
    ):
        with torch.no_grad():
            outs = []
            for options in ({}, FP8):
                with make(**options):
                    outs.append(F.scaled_dot_product_attention(*qkv))
        pairs.append(outs)
    return pairs


@pytest.mark.parametrize("ring", [1, 2])
def test_with_the_sparse_modes(rank_pool, ring):
    for (exact, near), (exact_blocks, near_blocks) in rank_pool.run(with_sparse_modes, 2, ring):
        # Rounded keys may be kept although exact ones would not be.
        assert 1e-5 < relative_error(near, exact) < 0.5
        assert 1e-5 < relative_error(near_blocks, exact_blocks) < BOUND


def count(ring, ulysses, dtype, comm_dtype):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.to(dtype).tensor_split(ring * ulysses, dim=2)[mesh.get_rank()] for x in make_qkv(64, 4, 16, B=2)]
    with (
        torch.no_grad(),
        UnifiedAttnMode(mesh, assume_equal=True, comm_dtype=comm_dtype),
        Traffic() as traffic,
    ):
        F.scaled_dot_product_attention(*qkv)
    return traffic.sent


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_wire_sends_one_byte_per_element_and_scales(rank_pool, ring, ulysses):
    ranks = ring * ulysses
    for whole, half in zip(
        rank_pool.run(count, ranks, ring, ulysses, torch.bfloat16, None),
        rank_pool.run(count, ranks, ring, ulysses, torch.bfloat16, torch.float8_e4m3fn),
        strict=True,
    ):
        assert half == [bytes_before * (16 + 4) // (2 * 16) for bytes_before in whole]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("tokens", "heads"), [(288, 24), (291, 25)])
def test_rounded_ulysses_with_kernels_launches_7(ranks, tokens, heads):
    counter = count_attention(1, ranks, tokens=tokens, heads=heads, device="meta", comm_dtype=torch.float8_e4m3fn)
    assert {name: number for name, number in counter.by_operator.items() if name.startswith("para_core")} == {
        "para_core::pack": 2,
        "para_core::unpack": 2,
    }
    assert counter.launches == 7, str(counter)


@pytest.mark.parametrize("ranks", [2, 8])
def test_rounded_ring_with_kernels_launches_one_more_per_block(ranks):
    whole, half = (
        count_attention(ranks, 1, device="meta", backend="triton", comm_dtype=comm_dtype)
        for comm_dtype in (None, torch.float8_e4m3fn)
    )
    assert half.launches == whole.launches + ranks - 1, str(half)


def learn(comm_dtype):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(16, 4, 8)]
    with UnifiedAttnMode(mesh, comm_dtype=comm_dtype):
        F.scaled_dot_product_attention(*qkv).square().sum().backward()
    return [x.grad for x in qkv]


def test_with_gradients_it_is_exact(rank_pool):
    for gradients, expected in zip(
        rank_pool.run(learn, 2, torch.float8_e4m3fn), rank_pool.run(learn, 2, None), strict=True
    ):
        assert all(torch.equal(gradient, reference) for gradient, reference in zip(gradients, expected, strict=True))


def make_mode(comm_dtype):
    UnifiedAttnMode(init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)), comm_dtype=comm_dtype)


def test_other_dtypes_are_refused(rank_pool):
    with pytest.raises(
        RankPoolError, match=r"(Type|Value)Error: .*comm_dtype.* torch\.bfloat16.* torch\.int8 .*torch\.float8_e4m3fn"
    ):
        rank_pool.run(make_mode, 2, torch.bfloat16)


@pytest.mark.parametrize("options", [FP8, INT8])
def test_options_survive_their_json_and_lose_the_dtype_for_gradients(options):
    rounded = AttnOptions.of(rotate_method="allgather", **options)
    assert AttnOptions.read(rounded.as_text()) == rounded
    assert rounded.with_gradients == AttnOptions(rotate_method="allgather")
    assert rounded.records["comm_dtype"] == str(options["comm_dtype"])
