"""The roofline on paper: its arithmetic by hand, and that the page shows what the program found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.attention.compile_kernel import Compiled
from benchmarks.attention_compiled import Counts, loop_counts
from benchmarks.attention_roofline import DEVICES, FLASH, Device, on_paper, page, tile_of_flash

ROOT = Path(__file__).parents[2]


def test_the_shares_are_those_computed_by_hand():
    device = Device("toy", 80, 1.0, 0.1, multiprocessors=2, gigahertz=1.0, source="none", exponentials=5)
    # 2 programs of 4 queries, 4 tiles of 2 keys; 8 tokens of 2 dims are 4 · 8 · 2 · 2 = 128 bytes in all.
    found = on_paper(device, Counts(flops=1000, bytes=16, exponentials=8), (4, 2), tokens=8, head_dim=2)
    assert found["flops per byte, each loaded once"] == pytest.approx(8000 / 128, abs=0.05)
    assert found["flops per byte, no cache"] == pytest.approx(8000 / (8 * 16 + 64), abs=0.05)
    # 64 exponentials at 10 per nanosecond beside 8000 flops at 1000 per nanosecond.
    assert found["exponentials / matrix"] == pytest.approx(6.4 / 8, abs=1e-3)
    assert found["memory, no cache / matrix"] == pytest.approx(192 / 100 / 8, abs=1e-3)


def test_tiles_of_flash_are_those_that_its_sources_choose():
    large = {64: (128, 128), 96: (128, 64), 128: (128, 64), 256: (128, 64)}
    # 8.6 and 8.9 have less shared memory; 9.0 and later have room for two programs of 64 queries at once.
    expected = {
        80: large,
        86: {**large, 128: (128, 32), 256: (64, 64)},
        89: {**large, 128: (128, 32), 256: (64, 64)},
        90: {**large, 256: (64, 64)},
        100: {**large, 256: (64, 64)},
    }
    assert {arch: {dim: tile_of_flash(arch, dim) for dim in tiles} for arch, tiles in expected.items()} == expected


# As Triton 3.9 writes a loop for sm_100: one warp issues the products, the others jump back before them.
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
    # 128 queries, 128 keys, 16 dims: once for a block of threads; copies and exponentials are each thread's.
    assert loop_counts(compiled, num_warps=8) == Counts(2 * 2 * 128 * 128 * 16, 256 * 16, 256)


def test_the_page_shows_what_the_program_found():
    found = json.loads((ROOT / "benchmarks/results/attention_roofline.json").read_text())
    text = (ROOT / "docs/attention_kernel.md").read_text()
    assert page(text, found["rows"]) == text


def test_every_row_has_flash_beside_it():
    rows = json.loads((ROOT / "benchmarks/results/attention_roofline.json").read_text())["rows"]
    of = {name: [(row["device"], row["D"]) for row in rows if row["kernel"] == name] for name in ("triton", FLASH)}
    assert of["triton"] == of[FLASH] == [(device.name, dim) for device in DEVICES for dim in (64, 96, 128, 256)]
