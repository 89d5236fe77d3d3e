"""Every row of the attention kernel's table, compiled for its GPU, stays within registers, shared memory and the
allowed spills.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from para_core.kernels.attention_configs import (
    FLOAT32,
    HEAD_DIMS,
    HOPPER,
    TABLE,
    Config,
    ConfigKey,
    adjusted,
    in_int8,
    row_of_dim,
)
from tests.kernels.attention_compiled import (
    REGISTERS,
    SHARED_OF_SM,
    Counts,
    compile_attention,
    compile_hopper,
    loop_counts,
    loop_counts_of_roles,
)
from tests.kernels.compiled import ARCHS, SHARED_LIMIT, Compiled

pytestmark = pytest.mark.slow

LONG_128 = {arch: ConfigKey(arch, 128, False, "long") for arch in ARCHS}
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def check_room(compiled: Compiled, config: Config) -> None:
    assert compiled.spills <= config.spills
    assert compiled.shared <= SHARED_LIMIT[compiled.arch]
    # A multiprocessor gives registers to a warp in units of 256, and a block occupies 1 KiB more shared memory than it
    # requests.
    registers = -(-compiled.registers * 32 // 256) * 256 * config.num_warps
    assert registers * config.resident <= REGISTERS
    assert (compiled.shared + 1024) * config.resident <= SHARED_OF_SM[compiled.arch]


def check(compiled: Compiled, config: Config) -> None:
    check_room(compiled, config)
    assert TENSOR_CORE.get(compiled.arch, "mma.sync") in compiled.ptx
    # wgmma and tcgen05 read shared memory themselves.
    assert "ldmatrix" in compiled.ptx or compiled.arch in TENSOR_CORE
    # Tiles are copied while others are computed.
    assert "cp.async" in compiled.ptx
    assert "ex2.approx" in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90])
def test_long_row_of_dim_128_fits_and_loads_once(arch):
    config = TABLE[LONG_128[arch]]
    compiled = compile_attention(config, arch=arch, head_dim=128)
    check(compiled, config)
    counts = loop_counts(compiled, config.num_warps)
    scores = config.block_m * config.block_n
    # The products are q·kᵀ and p·v. Keys and values of a tile are loaded once.
    assert counts.flops == 2 * 2 * scores * 128
    assert counts.bytes == 2 * 2 * config.block_n * 128
    # There is one exponential for each weight, and a few for each row, which several threads share.
    assert scores <= counts.exponentials <= scores + 8 * config.block_m


CONTINUING = {"is_causal": True, "continues": True}
# This launch has all inputs at once. Rows of a mask begin at any byte.
EVERYTHING = {**CONTINUING, "ranges": 2, "tokens": 4097}
CALLS = {
    False: {"plain": {}, "continuing": {"continues": True}},
    True: {
        "a range, continuing": {**CONTINUING, "ranges": 1},
        "ranges, continuing": {**CONTINUING, "ranges": 2},
    },
}


def long(*arguments: object, unless: bool = False) -> Any:
    return pytest.param(*arguments, marks=[] if unless else [pytest.mark.long])


@pytest.mark.parametrize(
    ("case", "call"),
    [
        pytest.param(
            case,
            call,
            id=f"{case}-{call}",
            marks=[] if (str(case), call) == ("sm_86 D=256 full long", "plain") else [pytest.mark.long],
        )
        for case in TABLE
        for call in CALLS[case.is_causal]
    ],
)
def test_every_table_row_fits_without_wasted_products(case, call):
    options = CALLS[case.is_causal][call]
    config = adjusted(TABLE[case], case.head_dim, ranges=options.get("ranges", 0))
    compiled = compile_attention(config, arch=case.arch, head_dim=case.head_dim, **options)
    check(compiled, config)
    counts = loop_counts(compiled, config.num_warps)
    scores = config.block_m * config.block_n
    assert counts.flops == 2 * 2 * scores * case.head_dim
    assert counts.bytes == 2 * 2 * config.block_n * case.head_dim
    assert scores <= counts.exponentials <= scores + 8 * config.block_m


KINDS = {"bool": "bytes", "float": "bytes", "bits": "bits"}


@pytest.mark.parametrize(
    ("arch", "head_dim", "length", "mask", "everything"),
    [
        long(arch, dim, length, mask, everything, unless=(arch, dim, mask, everything) == (80, 128, "bool", False))
        for arch in ARCHS
        for dim in HEAD_DIMS
        for mask in KINDS
        for length, everything in (("long", False), ("long", True), ("short", True))
    ],
)
def test_mask_per_query_fits_into_shared_memory(arch, head_dim, length, mask, everything):
    options = EVERYTHING if everything else {}
    case = ConfigKey(arch, head_dim, everything, length)
    config = adjusted(TABLE[case], head_dim, mask=KINDS[mask], ranges=options.get("ranges", 0))
    check(compile_attention(config, arch=arch, head_dim=head_dim, mask=mask, mask_has_rows=True, **options), config)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["bool", "float", "bits"])
def test_a_mask_of_keys_needs_no_room(arch, head_dim, mask):
    config = adjusted(TABLE[ConfigKey(arch, head_dim, True, "long")], head_dim, ranges=2)
    check(compile_attention(config, arch=arch, head_dim=head_dim, mask=mask, **EVERYTHING), config)


INTEGER_PRODUCT = {90: "s32.s8.s8", 100: "kind::i8"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "head_dim", "length", "mask", "ranges"),
    [
        long(arch, dim, length, mask, ranges, unless=(arch, dim, length, ranges) == (80, 128, "short", 0))
        for arch in ARCHS
        for dim in HEAD_DIMS
        for length, mask, ranges in (
            ("short", "none", 0),
            ("long", "none", 1),
            ("long", "float", 2),
            ("long", "bits", 2),
        )
    ],
)
def test_in_8_bits_keys_are_multiplied_as_integers(arch, head_dim, length, mask, ranges):
    row = TABLE[ConfigKey(arch, head_dim, True, length)]
    config = in_int8(adjusted(row, head_dim, mask=KINDS.get(mask, "none"), ranges=ranges), head_dim)
    options = {**CONTINUING, "ranges": ranges, "mask": mask, "mask_has_rows": mask != "none"}
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, eight_bits=True, **options)
    check(compiled, config)
    assert INTEGER_PRODUCT.get(arch, "s32.s8.s8.s32") in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [long(arch, dim, unless=(arch, dim) == (80, 64)) for arch in ARCHS for dim in (64, 96, 128)],
)
def test_bit_mask_spills_nothing_and_loads_words_once(arch, head_dim):
    config = adjusted(TABLE[ConfigKey(arch, head_dim, False, "long")], head_dim, mask="bits")
    plain = compile_attention(config, arch=arch, head_dim=head_dim)
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, mask="bits", mask_has_rows=True)
    assert compiled.spills == 0
    # Words of two stages are in shared memory, and nothing with the size of the scores.
    assert compiled.shared - plain.shared <= 2 * config.block_m * config.block_n // 8
    words = loop_counts(compiled, config.num_warps).bytes - loop_counts(plain, config.num_warps).bytes
    assert words == config.block_m * config.block_n // 8


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["none", "float", "bits"])
def test_float32_is_multiplied_without_rounding(arch, head_dim, mask):
    options = {**EVERYTHING, "mask": mask, "mask_has_rows": mask != "none"}
    config = FLOAT32[head_dim > 128]
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float32, **options)
    check_room(compiled, config)
    assert "tf32" not in compiled.ptx and "mma" not in compiled.ptx and "fma.rn.f32" in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [long(arch, dim, unless=(arch, dim) == (80, 72)) for arch in ARCHS for dim in (40, 72, 80, 160, 192, 200)],
)
def test_untuned_head_dims_load_16_bytes_at_once(arch, head_dim):
    config = TABLE[ConfigKey(arch, row_of_dim(head_dim), True, "long")]
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float16, **CONTINUING)
    check(compiled, config)
    # Heads of 40, 72 and 88 dims begin at no multiple of 16 elements. cp.async does not load the result that the call
    # continues.
    assert "ld.global.b16" not in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (64, 256), (192, 128)])
def test_values_of_another_head_dim_fit(arch, head_dim, value_dim):
    config = TABLE[ConfigKey(arch, row_of_dim(max(head_dim, value_dim)), True, "long")]
    check(compile_attention(config, arch=arch, head_dim=head_dim, value_dim=value_dim, **CONTINUING), config)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_float16_and_a_negative_scale_fit(arch, head_dim):
    config = TABLE[ConfigKey(arch, head_dim, True, "long")]
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float16, scale=-1.0, **CONTINUING)
    check(compiled, config)


HOPPER_CALLS = {
    "all seen": {},
    "causal, a range, continuing": {"is_causal": True, "has_range": True, "continues": True},
}


@pytest.mark.parametrize(
    ("head_dim", "config", "call"),
    [
        pytest.param(
            dim,
            config,
            call,
            marks=[] if (dim, call) == (128, "all seen") else [pytest.mark.long],
            id=f"{dim}-{n}-{call}",
        )
        for dim, configs in HOPPER.items()
        for n, config in enumerate(configs)
        for call in HOPPER_CALLS
    ],
)
def test_hopper_tier_uses_tma_and_wgmma_without_spills(head_dim, config, call):
    compiled = compile_hopper(config, head_dim=head_dim, **HOPPER_CALLS[call])
    assert compiled.spills == 0
    assert compiled.shared <= SHARED_LIMIT[90]
    # Four warps load, and two groups of four compute. They trade registers.
    warps = 12 if config.specialized else config.num_warps
    assert ("setmaxnreg" in compiled.ptx) == config.specialized
    assert f".reqntid {32 * warps}" in compiled.ptx
    assert -(-compiled.registers * 32 // 256) * 256 * warps <= REGISTERS
    assert "wgmma.mma_async" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    # No thread loads a tile.
    assert "cp.async.c" not in compiled.ptx
    counts = loop_counts_of_roles(compiled) if config.specialized else loop_counts(compiled, config.num_warps)
    scores = config.block_m * config.block_n
    # The products are q·kᵀ and p·v. Keys and values of a tile are loaded once. There is one exponential for each
    # weight, and a few for each row.
    assert counts.flops == 2 * 2 * scores * head_dim
    assert counts.bytes == 2 * 2 * config.block_n * head_dim
    assert scores <= counts.exponentials <= scores + 8 * config.block_m


# Triton 3.9 writes such a loop for sm_100: one warp issues the products, and the others jump back before them.
BLACKWELL = """
$L__BB0_1:
	@%p1 bra 	$L__BB0_9;
	mov.b32 	%r2, 136316048;
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd9 + 0 ], 0x10, %r8;
	ex2.approx.ftz.f32 %r5, %r6;
	@%p2 bra 	$L__BB0_1;
	@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r9 + 0 ], %rd1, %rd2, %r2, %p3;
	@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r9 + 0 ], [ %r1 + 8 ], %rd2, %r2, %p3;
	bra.uni 	$L__BB0_1;
$L__BB0_9:
	@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r9 + 0 ], %rd1, %rd2, %r2, %p3;
"""


def test_products_of_blackwell_are_counted_by_their_descriptor():
    compiled = Compiled(100, 0, 0, 0, 0, ttgir="", ptx=BLACKWELL, cubin=b"")
    # The products have 128 queries, 128 keys and 16 dims, once for a block of threads. Each thread has its own copies
    # and exponentials.
    assert loop_counts(compiled, num_warps=8) == Counts(2 * 2 * 128 * 128 * 16, 256 * 16, 256)
