"""Every row of the attention kernel's table, compiled for its GPU, stays within registers, shared memory and the
allowed spills.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from para_core.kernels.attention_configs import (
    FLOAT32,
    FLOAT32_WIDE,
    TABLE,
    Config,
    fit_inputs,
    row_of,
    row_of_dim,
)
from tests.kernels.attention_compiled import (
    REGISTERS,
    SHARED_OF_SM,
    Counts,
    allowed_spills,
    compile_attention,
    loop_counts,
)
from tests.kernels.compiled import ARCHS, SHARED_LIMIT, Compiled

pytestmark = pytest.mark.slow

HEAD_DIMS = tuple(TABLE[80])
ROW_OF = {arch: row_of(arch // 10, arch % 10) for arch in ARCHS}
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def check_room(compiled: Compiled, config: Config, *, spills: int = 0, resident: int = 1) -> None:
    """Assert that ``resident`` programs fit on a multiprocessor at once, and that no thread spills more bytes."""
    assert compiled.spills <= spills
    assert compiled.shared <= SHARED_LIMIT[compiled.arch]
    # A multiprocessor gives registers to a warp in units of 256, and a block occupies 1 KiB more shared memory than it
    # requests.
    registers = -(-compiled.registers * 32 // 256) * 256 * config.num_warps
    assert registers * resident <= REGISTERS
    assert (compiled.shared + 1024) * resident <= SHARED_OF_SM[compiled.arch]


def check(compiled: Compiled, config: Config, *, spills: int = 0, resident: int = 1) -> None:
    check_room(compiled, config, spills=spills, resident=resident)
    assert TENSOR_CORE.get(compiled.arch, "mma.sync") in compiled.ptx
    # wgmma and tcgen05 read shared memory themselves.
    assert "ldmatrix" in compiled.ptx or compiled.arch in TENSOR_CORE
    # Tiles are copied while others are computed.
    assert "cp.async" in compiled.ptx
    assert "ex2.approx" in compiled.ptx


CONTINUING = {"is_causal": True, "continues": True}
# This launch has all inputs at once. Rows of a mask begin at any byte.
EVERYTHING = {**CONTINUING, "ranges": 2, "tokens": 4097}
CALLS = {
    "plain": {},
    "continuing": {"continues": True},
    "a range, continuing": {**CONTINUING, "ranges": 1},
    "ranges, continuing": {**CONTINUING, "ranges": 2},
}


def long(*arguments: object, unless: bool = False) -> Any:
    return pytest.param(*arguments, marks=[] if unless else [pytest.mark.long])


def fit(arch: int, head_dim: int, **inputs: Any) -> tuple[Config, int]:
    """Return the block sizes for these inputs, and the bytes that they may spill."""
    row, row_dim = ROW_OF[arch], row_of_dim(head_dim)
    return fit_inputs(row, row_dim, **inputs), allowed_spills(row, row_dim, **inputs)


def has_two_programs(arch: int, head_dim: int) -> bool:
    """Whether two programs of the row fit on a multiprocessor at once."""
    return head_dim == 64 and arch != 100


@pytest.mark.parametrize(
    ("arch", "head_dim", "call"),
    [
        long(arch, dim, call, unless=(arch, dim, call) in {(80, 128, "plain"), (89, 256, "plain"), (90, 128, "plain")})
        for arch in ARCHS
        for dim in HEAD_DIMS
        for call in CALLS
    ],
)
def test_every_table_row_fits_without_wasted_products(arch, head_dim, call):
    options = CALLS[call]
    config, spills = fit(arch, head_dim, ranges=options.get("ranges", 0))
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, **options)
    check(compiled, config, spills=spills, resident=2 if has_two_programs(arch, head_dim) else 1)
    counts = loop_counts(compiled, config.num_warps)
    scores = config.block_m * config.block_n
    # The products are q·kᵀ and p·v. Keys and values of a tile are loaded once.
    assert counts.flops == 2 * 2 * scores * head_dim
    assert counts.bytes == 2 * 2 * config.block_n * head_dim
    # There is one exponential for each weight, and a few for each row, which several threads share.
    assert scores <= counts.exponentials <= scores + 8 * config.block_m


KINDS = {"bool": "bytes", "float": "bytes", "bits": "bits"}


@pytest.mark.parametrize(
    ("arch", "head_dim", "mask", "everything"),
    [
        long(arch, dim, mask, everything, unless=(arch, dim, mask, everything) == (80, 128, "bool", False))
        for arch in ARCHS
        for dim in HEAD_DIMS
        for mask in KINDS
        for everything in (False, True)
    ],
)
def test_mask_per_query_fits_into_shared_memory(arch, head_dim, mask, everything):
    options = EVERYTHING if everything else {}
    config, spills = fit(arch, head_dim, mask=KINDS[mask], ranges=options.get("ranges", 0))
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, mask=mask, mask_has_rows=True, **options)
    check(compiled, config, spills=spills)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", ["bool", "float", "bits"])
def test_a_mask_of_keys_needs_no_room(arch, head_dim, mask):
    config, spills = fit(arch, head_dim, ranges=2)
    check(compile_attention(config, arch=arch, head_dim=head_dim, mask=mask, **EVERYTHING), config, spills=spills)


INTEGER_PRODUCT = {90: "s32.s8.s8", 100: "kind::i8"}


@pytest.mark.parametrize(
    ("arch", "head_dim", "mask", "ranges"),
    [
        long(arch, dim, mask, ranges, unless=(arch, dim, ranges) == (80, 128, 0))
        for arch in ARCHS
        for dim in HEAD_DIMS
        for mask, ranges in (("none", 0), ("none", 1), ("float", 2), ("bits", 2))
    ],
)
def test_in_8_bits_keys_are_multiplied_as_integers(arch, head_dim, mask, ranges):
    config, spills = fit(arch, head_dim, mask=KINDS.get(mask, "none"), ranges=ranges, eight_bits=True)
    options = {**CONTINUING, "ranges": ranges, "mask": mask, "mask_has_rows": mask != "none"}
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, eight_bits=True, **options)
    check(compiled, config, spills=spills)
    assert INTEGER_PRODUCT.get(arch, "s32.s8.s8.s32") in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_bit_mask_spills_nothing_and_loads_words_once(arch, head_dim):
    config, _ = fit(arch, head_dim, mask="bits")
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
    config = FLOAT32_WIDE if head_dim > 128 else FLOAT32
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float32, **options)
    check_room(compiled, config, spills=0 if head_dim > 128 else 256)
    assert "tf32" not in compiled.ptx and "mma" not in compiled.ptx and "fma.rn.f32" in compiled.ptx


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [long(arch, dim, unless=(arch, dim) == (80, 72)) for arch in ARCHS for dim in (40, 72, 80, 160, 192, 200)],
)
def test_other_head_dims_load_16_bytes_at_once(arch, head_dim):
    config, spills = fit(arch, head_dim)
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float16, **CONTINUING)
    check(compiled, config, spills=spills)
    # Heads of 40, 72 and 88 dims begin at no multiple of 16 elements. cp.async does not load the result that the call
    # continues.
    assert "ld.global.b16" not in compiled.ptx


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (64, 256), (192, 128)])
def test_values_of_another_head_dim_fit(arch, head_dim, value_dim):
    config, spills = fit(arch, max(head_dim, value_dim))
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, value_dim=value_dim, **CONTINUING)
    check(compiled, config, spills=spills)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_float16_and_a_negative_scale_fit(arch, head_dim):
    config, spills = fit(arch, head_dim)
    compiled = compile_attention(config, arch=arch, head_dim=head_dim, dtype=torch.float16, scale=-1.0, **CONTINUING)
    check(compiled, config, spills=spills)


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
