"""The benchmark of attention runs on a CPU at tiny sizes, and writes its results."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.attention import single_device as attention
from benchmarks.attention.single_device import Size


def test_it_writes_a_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention, "TINY", (Size(18, 16, False, heads=1, dtype="float16"),))
    file = tmp_path / "attention.json"
    assert attention.main(["--tiny", "--device", "cpu", "--output", str(file)]) == 0
    results = json.loads(file.read_text())
    assert {"device", "versions", "date"} <= set(results["environment"])
    for row in results["rows"]:
        assert row["TFLOP/s"] == pytest.approx(4 * 18 * 18 * 16 / row["ms"] / 1e9, abs=1e-3)
    assert len(capsys.readouterr().out.splitlines()) == len(results["rows"]) == 5


def test_work_and_bytes_are_those_of_the_formula():
    assert Size(4096, 128, False, heads=24).flops == 4 * 24 * 4096**2 * 128
    assert Size(4096, 128, True, heads=24).flops == 2 * 24 * 4096**2 * 128
    assert Size(4096, 128, False, heads=24).bytes == 4 * 24 * 4096 * 128 * 2


def test_without_a_gpu_it_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main([]) == 2
    assert "CUDA" in capsys.readouterr().out


def test_real_sizes_are_not_interpreted(capsys):
    assert attention.main(["--device", "cpu"]) == 2
    assert "add --tiny" in capsys.readouterr().out
