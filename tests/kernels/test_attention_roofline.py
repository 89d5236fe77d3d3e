"""The roofline on paper: its arithmetic by hand, and that the page shows what the program found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.attention_compiled import Counts
from benchmarks.attention_roofline import COMPILED, Device, on_paper, table

ROOT = Path(__file__).parents[2]


def test_the_shares_are_those_computed_by_hand():
    device = Device("toy", 80, tflops=1.0, terabytes=0.1, multiprocessors=2, gigahertz=1.0, exponentials=5)
    # 2 programs of 4 queries, 4 tiles of 2 keys; 8 tokens of 2 dims are 4 · 8 · 2 · 2 = 128 bytes in all.
    found = on_paper(device, Counts(flops=1000, bytes=16, exponentials=8), (4, 2), tokens=8, head_dim=2)
    assert found["flops per byte, each loaded once"] == pytest.approx(8000 / 128, abs=0.05)
    assert found["flops per byte, no cache"] == pytest.approx(8000 / (8 * 16 + 64), abs=0.05)
    assert found["ridge, flops per byte"] == 10.0
    # 64 exponentials at 10 per nanosecond beside 8000 flops at 1000 per nanosecond.
    assert found["exponentials / matrix"] == pytest.approx(6.4 / 8, abs=1e-3)
    assert found["memory, no cache / matrix"] == pytest.approx(192 / 100 / 8, abs=1e-3)


def test_the_page_shows_what_the_program_found():
    found = json.loads((ROOT / "benchmarks/results/attention_roofline.json").read_text())
    page = (ROOT / "docs/attention_kernel.md").read_text()
    rows = found["rows"]
    assert table(rows, [*COMPILED, *list(rows[0])[-5:]]) in page
