"""``bench --check`` demands the bits of one rank with ``same_bits``, and ``generate`` writes the digest of pixels."""

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from para_core.cli import measurement
from para_core.cli.bench import describe_check
from para_core.cli.comparison import compare, digest_pixels, make_reference
from para_core.fleet.build import build
from para_core.fleet.outputs import Result, encode
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, Request
from para_core.fleet.result_files import write_result

RECIPE = Recipe(str(Path(__file__).parents[2] / "zoo/flux/pipeline"), mesh=(("ulysses", 2),), same_bits=True)
REQUEST = Request({"prompt": "a", "width": 48, "height": 32, "num_inference_steps": 2, "max_sequence_length": 13})


def compare_with(references):
    pipe = build(RECIPE)
    own = [reference if torch.distributed.get_rank() == 0 else None for reference in references]
    return [compare(pipe, REQUEST, RECIPE, reference, lambda: None) for reference in own]


def test_check_passes_only_with_the_bits_of_one_rank(rank_pool):
    exact = make_reference(RECIPE, REQUEST)
    pixels = exact.pixels.copy()
    pixels.flat[0] = np.nextafter(pixels.flat[0], np.float32(2))
    same, other = rank_pool.run(compare_with, 2, [exact, replace(exact, pixels=pixels)])[0]
    digest = digest_pixels(exact.pixels)
    assert same["passed"] and same["same bits"]
    assert same["sha256 of one rank"] == digest and same["sha256 of each rank"] == [digest, digest]
    assert not other["passed"] and other["relative error"] < other["bound"]
    for wrong in (other, {**same, "relative error": None, "passed": False}):
        assert any("WRONG" in line for line in describe_check(wrong))
    assert f"SHA-256 of rank 0 to 1: {digest}" in describe_check(same)
    assert "--products triton" in describe_check({**other, "same bits required": False, "products": "triton"})[0]


@pytest.mark.parametrize("size", [(1, 1), (5, 3)])
def test_a_record_has_the_digest_pixels_the_pixels_of_a_png(tmp_path, size):
    images = [Image.effect_noise(size, 50).convert("RGB") for _ in range(2)]
    write_result(tmp_path, Line(1, REQUEST, "digest", "cat"), Result(tuple(encode(images, Delivery("png"))), {}))
    record = json.loads((tmp_path / "cat.json").read_text())
    for name, digest in zip(record["files"], record["pixels sha256"], strict=True):
        file = Image.open(io.BytesIO((tmp_path / name).read_bytes()))
        assert hashlib.sha256(file.tobytes()).hexdigest() == digest
        assert json.loads(file.info["para_core"])["pixels sha256"] == record["pixels sha256"]


def test_the_reference_has_as_many_threads_as_the_ranks(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = []

    class Started:
        def __init__(self, *_, env, **__):
            started.append(env)
            raise RuntimeError("started")

    monkeypatch.setattr(measurement, "LaunchedRanks", Started)
    monkeypatch.setattr(measurement, "open_ranks", lambda *_, **__: object.__new__(Started))
    for threads in ("", "2"):
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with pytest.raises(RuntimeError, match="started"):
            measurement._generate_reference(measurement.MeasurementJob(RECIPE, REQUEST, 0, 1), 2)
    assert started == [{"OMP_NUM_THREADS": "1"}, {}]
