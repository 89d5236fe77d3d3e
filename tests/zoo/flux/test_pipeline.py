"""Plain diffusers loads the committed pipeline folder offline, and it generates the objects of a caption."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from zoo.flux import PIPELINE
from zoo.flux.scenes import ImageScene, Thing, caption

pytestmark = pytest.mark.slow

LIMIT = 25 * 2**20  # bytes

SCENES = [
    ImageScene((Thing("red", "square", "large", "centre"),), "white"),
    ImageScene((Thing("blue", "circle", "large", "top left"),), "black"),
    ImageScene((Thing("green", "triangle", "large", "bottom right"),), "grey"),
]


def test_plain_diffusers_loads_the_folder_offline_and_draws():
    index = json.loads((PIPELINE / "model_index.json").read_text())
    libraries = {value[0] for name, value in index.items() if not name.startswith("_")}
    assert libraries == {None, "diffusers", "transformers"}
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "max_sequence_length": 64, "generator": torch.Generator().manual_seed(0)}
    images = pipe([caption(scene) for scene in SCENES], height=64, width=64, output_type="np", **options).images
    # benchmarks/results/tiny_flux.json records how many objects are drawn correctly. This test does not check it.
    assert all(image.std() > 0 for image in images)
    assert not np.array_equal(images[0], images[1])
    assert pipe(caption(SCENES[0]), height=32, width=80, **options).images[0].size == (80, 32)


def test_the_folder_is_small_and_bfloat16():
    assert sum(path.stat().st_size for path in PIPELINE.rglob("*") if path.is_file()) <= LIMIT
    for path in PIPELINE.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}, path
    transformer = json.loads((PIPELINE / "training.json").read_text())["parameters"]["transformer"]
    assert 2e6 <= transformer <= 8e6
