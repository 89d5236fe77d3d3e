"""The options of attention, by name and by step, compared with the same values of ``parallelize_pipe``."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from para_core.adapters import AttentionSchedule, KeptKeys, parallelize_pipe
from para_core.cli.app import run
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.recipe import Recipe, approximations
from tests.attention.fake_libraries import libraries_installed

pytestmark = pytest.mark.slow

TINY_WAN = Path(__file__).parents[2] / "zoo/video/pipeline"


def draw(folder, options, **call):
    """Return the output of a pipeline on one rank with these options of ``parallelize_pipe``."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return parallelize_pipe(pipe, **options)("a", generator=torch.Generator().manual_seed(0), **call)


def test_attention_by_step_is_that_of_python(tmp_path):
    folder, schedule = str(find_tiny_flux()), AttentionSchedule("sage", first=1, last=2, exact="math")
    options = ["--attention-schedule", "sage:1:2", "--backend", "math", "--set", "max_sequence_length=64"]
    with libraries_installed() as calls:
        call = {"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 64}
        expected = draw(folder, {"backend": schedule}, **call).images[0]
        in_python = calls["sage"]
        command = ["generate", "--model", folder, "--prompt", "a", "--size", "64x64", "--steps", "4"]
        assert run([*command, *options, "--out", str(tmp_path)]) == 0
    assert calls["sage"] == 2 * in_python > 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "00001.png")), np.asarray(expected))
    recorded = json.loads((tmp_path / "00001.json").read_text())["recipe"]["backend"]
    assert AttentionSchedule(**recorded) == schedule


@pytest.mark.long
def test_attention_to_the_text_is_that_of_python(tmp_path):
    wan = str(TINY_WAN)
    with libraries_installed() as calls:
        call = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
        draw(wan, {"cross_backend": "sage"}, **call)
        in_python = calls["sage"]
        command = ["generate", "--model", wan, "--prompt", "a", "--size", "32x32", "--steps", "2", "--frames", "5"]
        assert run([*command, "--cross-backend", "sage", "--out", str(tmp_path)]) == 0
    assert calls["sage"] == 2 * in_python > 0


@pytest.mark.long
def test_kept_keys_by_step_are_those_of_python(tmp_path):
    folder, schedule = str(find_tiny_flux()), AttentionSchedule(KeptKeys(0.25), first=1, last=1)
    call = {"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 64}
    expected, exact = (draw(folder, {"backend": backend}, **call).images[0] for backend in (schedule, None))
    command = ["generate", "--model", folder, "--prompt", "a", "--size", "64x64", "--steps", "4"]
    options = ["--attention-schedule", "keys=0.25:1:1", "--set", "max_sequence_length=64"]
    assert run([*command, *options, "--out", str(tmp_path)]) == 0
    pixels = np.asarray(Image.open(tmp_path / "00001.png"))
    assert np.array_equal(pixels, np.asarray(expected))
    assert not np.array_equal(pixels, np.asarray(exact))
    recorded = json.loads((tmp_path / "00001.json").read_text())["recipe"]["backend"]
    assert recorded["middle"] == {"share": 0.25, "window": 64}


def test_attention_is_part_of_the_digest():
    backends = ["math", "sage", AttentionSchedule("sage"), AttentionSchedule(KeptKeys(0.5))]
    recipes = [Recipe("model"), Recipe("model", cross_backend="sage"), *[Recipe("model", backend=x) for x in backends]]
    assert len({recipe.digest for recipe in recipes}) == len(recipes)
    assert approximations(recipes[-1]) == ("attention_schedule",)
    assert approximations(Recipe("model", backend=AttentionSchedule("cudnn"))) == ()
