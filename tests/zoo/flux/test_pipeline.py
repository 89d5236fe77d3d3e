"""The committed pipeline folder: plain diffusers loads it offline and generates what a caption says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.flux import PIPELINE
from zoo.flux.grammar import Scene, Thing, caption

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

LIMIT = 25 * 2**20  # bytes

GENERATE = """
import json, sys
import torch
from diffusers import FluxPipeline

torch.set_num_threads(2)
folder, output, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
pipe = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
generator = torch.Generator().manual_seed(0)
options = dict(height=64, width=64, num_inference_steps=2, max_sequence_length=64, generator=generator)
for i, image in enumerate(pipe(prompts, **options).images):
    image.save(f"{output}/{i}.png")
small = pipe(prompts[0], height=32, width=80, num_inference_steps=1, max_sequence_length=48).images[0]
assert small.size == (80, 32)
assert not [name for name in sys.modules if name.split(".")[0] in ("benchmarks", "para_core")]
"""

SCENES = [
    Scene((Thing("red", "square", "large", "centre"),), "white"),
    Scene((Thing("blue", "circle", "large", "top left"),), "black"),
    Scene((Thing("green", "triangle", "large", "bottom right"),), "grey"),
]


def test_plain_diffusers_loads_the_folder_offline_and_draws(tmp_path):
    prompts = json.dumps([caption(scene) for scene in SCENES])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", GENERATE, str(PIPELINE), str(tmp_path), prompts]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    images = [np.asarray(Image.open(tmp_path / f"{i}.png")) for i in range(len(SCENES))]
    # benchmarks/results/tiny_flux.json records how many things are drawn correctly; this test does not.
    assert all(image.std() > 0 for image in images)
    assert not np.array_equal(images[0], images[1])


def test_the_folder_is_small_and_bfloat16():
    assert sum(path.stat().st_size for path in PIPELINE.rglob("*") if path.is_file()) <= LIMIT
    for path in PIPELINE.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}, path
    transformer = json.loads((PIPELINE / "training.json").read_text())["parameters"]["transformer"]
    assert 2e6 <= transformer <= 8e6
