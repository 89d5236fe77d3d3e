"""Every row of the attention kernel's table, compiled for its GPU: within registers, shared memory and the spills it admits."""

from __future__ import annotations

import pytest

from benchmarks.attention_compiled import (
    REGISTERS,
    SHARED_OF_SM,
    compile_attention,
    compile_hopper,
    loop_counts,
    loop_counts_of_roles,
)
from benchmarks.compiled import ARCHS, SHARED_LIMIT, Compiled
from para_core.kernels.attention_configs import FLOAT32, HOPPER, TABLE, Case, Config, beside_bits, beside_mask, in_int8

LONG_128 = {arch: Case(arch, 128, False, "long") for arch in ARCHS}
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def check(found: Compiled, config: Config) -> None:
    assert found.spills <= config.spills
    assert found.shared <= SHARED_LIMIT[found.arch]
    # A multiprocessor gives registers to a warp in units of 256, and 1 KiB of shared memory to a block beside what it asks for.
    registers = -(-found.registers * 32 // 256) * 256 * config.num_warps
    assert registers * config.resident <= REGISTERS
    assert (found.shared + 1024) * config.resident <= SHARED_OF_SM[found.arch]
    assert TENSOR_CORE.get(found.arch, "mma.sync") in found.ptx
    # wgmma and tcgen05 read shared memory themselves.
    assert "ldmatrix" in found.ptx or found.arch in TENSOR_CORE
    # Tiles are on their way while others are computed.
    assert "cp.async" in found.ptx
    assert "ex2.approx" in found.ptx


@pytest.mark.parametrize("arch", [80, 90])
def test_the_row_for_long_sequences_of_head_dim_128_fits_and_loads_no_byte_twice(arch):
    config = TABLE[LONG_128[arch]]
    found = compile_attention(config, arch=arch, head_dim=128)
    check(found, config)
    counts = loop_counts(found, config.num_warps)
    scores = config.block_m * config.block_n
    # q·kᵀ and p·v; keys and values of a tile, once.
    assert counts.flops == 2 * 2 * scores * 128
    assert counts.bytes == 2 * 2 * config.block_n * 128
    # One for each weight, and a few for each row, which several threads share.
    assert scores <= counts.exponentials <= scores + 8 * config.block_m


@pytest.mark.long
@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("continues", [False, True])
def test_every_row_of_the_table_fits(case, continues):
    config = TABLE[case]
    options = {"is_causal": case.is_causal, "continues": continues}
    check(compile_attention(config, arch=case.arch, head_dim=case.head_dim, **options), config)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_there_is_room_for_a_mask_of_every_row(arch, head_dim, mask):
    config = beside_mask(TABLE[Case(arch, head_dim, False, "long")])
    options = {"mask": mask, "mask_has_rows": True, "is_causal": True}
    found = compile_attention(config, arch=arch, head_dim=head_dim, **options)
    assert found.shared <= SHARED_LIMIT[arch]


INTEGER_PRODUCT = {90: "s32.s8.s8", 100: "kind::i8"}


@pytest.mark.parametrize(
    ("arch", "head_dim", "length"),
    [
        pytest.param(arch, dim, length, marks=[] if (arch, dim, length) == (80, 128, "short") else [pytest.mark.long])
        for arch in ARCHS
        for dim in (64, 96, 128, 256)
        for length in ("short", "long")
    ],
)
def test_in_8_bits_keys_are_multiplied_as_integers_and_nothing_spills(arch, head_dim, length):
    config = in_int8(TABLE[Case(arch, head_dim, True, length)], head_dim)
    found = compile_attention(config, arch=arch, head_dim=head_dim, is_causal=True, continues=True, eight_bits=True)
    check(found, config)
    assert found.spills == 0
    assert INTEGER_PRODUCT.get(arch, "s32.s8.s8.s32") in found.ptx


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [
        pytest.param(arch, dim, marks=[] if (arch, dim) == (80, 64) else [pytest.mark.long])
        for arch in ARCHS
        for dim in (64, 96, 128)
    ],
)
def test_a_mask_of_bits_spills_nothing_and_is_loaded_once_a_word(arch, head_dim):
    config = beside_bits(TABLE[Case(arch, head_dim, False, "long")])
    plain = compile_attention(config, arch=arch, head_dim=head_dim)
    found = compile_attention(config, arch=arch, head_dim=head_dim, mask="bits", mask_has_rows=True)
    assert found.spills == 0
    # Words of two stages, and nothing of the size of the scores.
    assert found.shared - plain.shared <= 2 * config.block_m * config.block_n // 8
    if arch < 100:
        words = loop_counts(found, config.num_warps).bytes - loop_counts(plain, config.num_warps).bytes
        assert words == config.block_m * config.block_n // 8


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_is_multiplied_without_rounding(arch, head_dim):
    found = compile_attention(FLOAT32, arch=arch, head_dim=head_dim, dtype="fp32", has_ranges=True, mask="bool")
    assert found.shared <= SHARED_LIMIT[arch]
    assert "tf32" not in found.ptx and "fma.rn.f32" in found.ptx


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [40, 80, 160, 192, 200])
@pytest.mark.parametrize("arch", [80, 90])
def test_head_dims_between_the_tuned_ones_take_the_next_row(arch, head_dim):
    row = next(dim for dim in (64, 96, 128, 256) if head_dim <= dim)
    config = TABLE[Case(arch, row, False, "long")]
    check(compile_attention(config, arch=arch, head_dim=head_dim, dtype="fp16"), config)


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
def test_the_hopper_tier_loads_by_the_copy_engine_multiplies_by_warpgroups_and_spills_nothing(head_dim, config, call):
    found = compile_hopper(config, head_dim=head_dim, **HOPPER_CALLS[call])
    assert found.spills == 0
    assert found.shared <= SHARED_LIMIT[90]
    # Warps that load, and two groups that compute: 4 of each; they trade registers.
    warps = 12 if config.specialized else config.num_warps
    assert ("setmaxnreg" in found.ptx) == config.specialized
    assert f".reqntid {32 * warps}" in found.ptx
    assert -(-found.registers * 32 // 256) * 256 * warps <= REGISTERS
    assert "wgmma.mma_async" in found.ptx
    assert "cp.async.bulk.tensor" in found.ptx
    # No thread loads a tile.
    assert "cp.async.c" not in found.ptx
    counts = loop_counts_of_roles(found) if config.specialized else loop_counts(found, config.num_warps)
    scores = config.block_m * config.block_n
    # q·kᵀ and p·v; keys and values of a tile, once; one exponential for each weight, and a few for each row.
    assert counts.flops == 2 * 2 * scores * head_dim
    assert counts.bytes == 2 * 2 * config.block_n * head_dim
    assert scores <= counts.exponentials <= scores + 8 * config.block_m
