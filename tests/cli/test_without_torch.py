"""Errors that need no model: they are found before torch, diffusers or transformers are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Runs its command lines in one process, and prints for each the exit code, stderr and what was imported so far.
PROBE = """
import contextlib, io, json, sys
from para_core.cli.app import run
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = run(arguments)
    imported = [name for name in ("torch", "diffusers", "transformers", "ray") if name in sys.modules]
    print(json.dumps([arguments, code, said.getvalue(), imported]))
"""
PROMPT = ["generate", "--prompt", "a"]
# Each with the exit code and what the message names.
CASES = [
    (["generate"], 2, "no prompt"),
    (["generate", "--steps", "3", "--set", "true_cfg_scale=2"], 2, "no prompt"),
    (["generate", "--model", "zoo/video/pipeline"], 2, "no prompt"),
    ([*PROMPT, "--compile", "foo"], 2, "--compile is 'foo'"),
    ([*PROMPT, "--weights", "foo"], 2, "--weights is 'foo'"),
    ([*PROMPT, "--dtype", "foo"], 2, "--dtype is 'foo'"),
    ([*PROMPT, "--quantize", "foo"], 2, "--quantize is 'foo'"),
    ([*PROMPT, "--backend", "foo"], 2, "--backend is 'foo'"),
    ([*PROMPT, "--attention-backend", "foo"], 2, "--backend is 'foo'"),
    ([*PROMPT, "--cross-backend", "foo"], 2, "--cross-backend is 'foo'"),
    ([*PROMPT, "--attention-schedule", "foo:1:1"], 2, "'foo'"),
    ([*PROMPT, "--mesh", "foo=2"], 2, "--mesh has 'foo=2'"),
    ([*PROMPT, "--cache", "abc"], 2, "--cache is 'abc'"),
    ([*PROMPT, "--offload", "foo"], 2, "--offload is 'foo'"),
    ([*PROMPT, "--text-encoders", "foo"], 2, "--text-encoders is 'foo'"),
    ([*PROMPT, "--vae-placement", "foo"], 2, "--vae-placement is 'foo'"),
    ([*PROMPT, "--rotate-method", "foo"], 2, "--rotate-method is 'foo'"),
    ([*PROMPT, "--comm-dtype", "foo"], 2, "--comm-dtype is 'foo'"),
    ([*PROMPT, "--size", "12"], 2, "--size is '12'"),
    ([*PROMPT, "--format", "xyz"], 2, "--format is 'xyz'"),
    ([*PROMPT, "--format", "mp4"], 2, "--format is 'mp4'"),
    ([*PROMPT, "--steps", "0"], 2, "--steps is 0"),
    ([*PROMPT, "--set", "stepz=3"], 2, "steps?"),
    ([*PROMPT, "--ranks", "0"], 2, "--ranks 0"),
    ([*PROMPT, "--memory", "0"], 2, "--memory 0"),
    ([*PROMPT, "--timeout", "0"], 2, "--timeout is 0"),
    ([*PROMPT, "--name", "a/b"], 2, "--name is 'a/b'"),
    ([*PROMPT, "--lora", "absent.safetensors"], 1, "'absent.safetensors'"),
    ([*PROMPT, "--model", "/absent"], 1, "'/absent'"),
    ([*PROMPT, "--model", "absent"], 1, "'absent'"),
    ([*PROMPT, "--model", "absent.gguf"], 1, "'absent.gguf'"),
    ([*PROMPT, "--model", "README.md"], 2, "--model is 'README.md'"),
    ([*PROMPT, "--pipeline", "FluxImg2ImgPipelin"], 2, "Did you mean FluxImg2ImgPipeline?"),
    ([*PROMPT, "--pipeline", "QwenImagePipeline"], 2, "FluxTransformer2DModel"),
    ([*PROMPT, "--pipeline", "StableDiffusionPipeline"], 2, "unet"),
    ([*PROMPT, "--pipeline", "FluxControlNetPipeline"], 2, "--controlnet"),
    ([*PROMPT, "--pipeline", "FluxImg2ImgPipeline"], 2, "--image FILE"),
    ([*PROMPT, "--image", "README.md"], 2, "FluxImg2ImgPipeline"),
    ([*PROMPT, "--set", "mask_image=README.md"], 2, "FluxInpaintPipeline"),
    ([*PROMPT, "--controlnet", "/absent"], 1, "'/absent'"),
    ([*PROMPT, "--config", "zoo/flux/pipeline"], 2, "--config is 'zoo/flux/pipeline'"),
    (["generate", "--prompts", "/absent.jsonl"], 1, "/absent.jsonl"),
    (["serve", "--weights", "foo"], 2, "--weights is 'foo'"),
    (["serve", "--format", "xyz"], 2, "--format is 'xyz'"),
    (["serve", "--model", "/absent"], 1, "'/absent'"),
    (["serve", "--max-size", "big"], 2, "--max-size big: size is 'big'"),
    (["serve", "--warmup", "big"], 2, "--warmup big"),
    (["bench", "--quantize", "foo"], 2, "--quantize is 'foo'"),
    (["bench", "--model", "/absent"], 1, "'/absent'"),
    (["bench", "--out", "README.md"], 1, "README.md exists"),
    (["bench", "--out", "absent/figures.json"], 1, "absent/figures.json cannot be written"),
    (["bench", "--profile", "README.md"], 1, "--profile README.md"),
    ([*PROMPT, "--mesh", "ring=2,ulysses=1", "--ranks", "4"], 2, "--mesh is too small"),
    (["bench", "--mesh", "ring=2,ulysses=1", "--ranks", "4"], 2, "--mesh is too small"),
    (["serve", "--mesh", "ring=2,ulysses=1", "--ranks", "4"], 2, "--mesh is too small"),
    (["plan", "--model", "/absent/model"], 1, "'/absent/model'"),
    (["plan", "--model", "zoo"], 1, "model_index.json"),
    (["plan", "--model", "absent.gguf"], 2, "--model is 'absent.gguf'"),
    (["plan", "--model", "/absent.safetensors"], 1, "'/absent.safetensors'"),
    (["plan", "--model", "zoo/flux/pipeline", "--pipeline", "FluxImg2ImgPipelin"], 2, "FluxImg2ImgPipeline?"),
    (["plan", "--model", "zoo/flux/pipeline", "--config", "zoo/video"], 2, "--config is 'zoo/video'"),
]


def answers_to(commands, **variables):
    """Run the command lines in one process, and return its answers. ``variables`` are added to its environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "2000", **variables}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def answers():
    return answers_to([arguments for arguments, *_ in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(arguments) for arguments, *_ in CASES])
def test_error_is_found_before_torch_is_imported(answers, number):
    arguments, code, said = CASES[number]
    assert answers[number][:2] == [arguments, code], answers[number][2]
    assert said in answers[number][2]
    assert answers[number][3] == []


def test_existing_traces_are_found_before_torch_is_imported(tmp_path):
    trace = tmp_path / "rank-1.json.gz"
    trace.touch()
    ((_, code, said, imported),) = answers_to([["bench", "--ranks", "2", "--profile", str(tmp_path)]])
    assert code == 1
    assert f"{trace} exists" in said
    assert imported == []


def test_ranks_of_torchrun_are_checked_before_torch_is_imported():
    mesh = ["--mesh", "ring=2,ulysses=1"]
    commands = [[*PROMPT, *mesh], ["bench", *mesh], [*PROMPT, "--ranks", "3"]]
    answers = answers_to(commands, RANK="1", WORLD_SIZE="4")
    for _, code, said, imported in answers:
        assert code == 2
        assert "--mesh is too small: 4 ranks" in said or "torchrun started 4 ranks" in said
        assert imported == []
    assert len(answers) == len(commands)
