"""The command with a folder of a modular pipeline."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from para_core.cli.app import run
from tests.modular_folders import plain_modular, save_modular

CALL = {"prompt": "a large red circle", "negative_prompt": "a square", "height": 48, "width": 64}
OPTIONS = ["--prompt", CALL["prompt"], "--negative-prompt", CALL["negative_prompt"], "--size", "64x48", "--steps", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_modular("qwen-image", str(tmp_path_factory.mktemp("modular")))


def test_generate_equals_modular_pipeline_alone(folder, tmp_path):
    (tmp_path / "start.png").write_bytes(png())
    options = [*OPTIONS, "--guidance", "2.5", "--image", str(tmp_path / "start.png"), "--set", "strength=0.5"]
    assert run(["generate", "--model", folder, *options, "--seed", "5", "--out", str(tmp_path)]) == 0
    call = {**CALL, "num_inference_steps": 2, "strength": 0.5, "image": Image.open(tmp_path / "start.png")}
    expected = plain_modular(folder, "images", seed=5, guidance=2.5, **call)[0]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "00001.png")), np.asarray(expected))
    record = json.loads((tmp_path / "00001.json").read_text())
    assert (record["pipeline"], record["request"]["guidance_scale"]) == ("QwenImageModularPipeline", 2.5)


def png():
    file = io.BytesIO()
    Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--frames", "5"], "frames"),
        (["--offload", "model"], "offload.*QwenImageModularPipeline"),
        (["--guidance", "NaN"], "guidance"),
        (["--set", "latents=1"], "latents"),
        (["--format", "mp4"], "QwenImageModularPipeline"),
    ],
)
def test_what_blocks_do_not_take_is_named_before_loading(folder, tmp_path, capsys, options, named):
    assert run(["generate", "--model", folder, *OPTIONS, *options, "--out", str(tmp_path / "out")]) == 2
    assert re.search(named, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_dry_run_shows_mesh_of_guider(folder, tmp_path, capsys):
    assert run(["generate", "--model", folder, *OPTIONS, "--ranks", "2", "--dry-run", "--out", str(tmp_path)]) == 0
    stdout = capsys.readouterr().out
    assert "QwenImageModularPipeline" in stdout
    assert re.search(r"batch 2 × ring 1 × ulysses 1", stdout)


@pytest.mark.long
def test_bench_compares_with_modular_pipeline_alone(folder, tmp_path):
    out = tmp_path / "figures.json"
    options = [*OPTIONS, "--runs", "1", "--warmup-runs", "0", "--check", "--out", str(out)]
    assert run(["bench", "--model", folder, *options]) == 0
    assert json.loads(out.read_text())["check"]["relative error"] == 0
