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
# Some commands name them.
FILES = ("README.md", "zoo")
# Each with the exit code and the words that the message has.
CASES = [
    (["generate"], 2, "no prompt"),
    (["generate", "--steps", "3", "--set", "true_cfg_scale=2"], 2, "no prompt"),
    (["generate", "--model", "zoo/video/pipeline"], 2, "no prompt"),
    # A bad value of an option.
    ([*PROMPT, "--compile", "foo"], 2, "--compile is 'foo'", "no, blocks, whole"),
    ([*PROMPT, "--weights", "foo"], 2, "--weights is 'foo'"),
    ([*PROMPT, "--weights", "tensor"], 2, "--weights", "--mesh tensor=2"),
    ([*PROMPT, "--dtype", "foo"], 2, "--dtype is 'foo'"),
    ([*PROMPT, "--quantize", "foo"], 2, "--quantize is 'foo'"),
    ([*PROMPT, "--backend", "foo"], 2, "--backend is 'foo'", "flash"),
    ([*PROMPT, "--attention-backend=foo"], 2, "--backend is 'foo'"),
    ([*PROMPT, "--cross-backend", "foo"], 2, "--cross-backend is 'foo'", "flash"),
    ([*PROMPT, "--attention-schedule", "foo:1:1"], 2, "'foo'"),
    ([*PROMPT, "--attention-schedule", "fast"], 2, "--attention-schedule fast", "triton-int8"),
    ([*PROMPT, "--attention-schedule", "keys=half"], 2, "--attention-schedule keys=half"),
    ([*PROMPT, "--attention-schedule", "sage:4"], 2, "--attention-schedule sage:4", "sage:4:4"),
    ([*PROMPT, "--attention-schedule", "sage:a:4"], 2, "--attention-schedule sage:a:4", "sage:4:4"),
    ([*PROMPT, "--attention-schedule", "sage:4:-1"], 2, "--attention-schedule sage:4:-1", "sage:4:4"),
    ([*PROMPT, "--attention-schedule", "keys=2:4:4"], 2, "--attention-schedule keys=2:4:4", "2.0"),
    ([*PROMPT, "--attention-schedule", "math", "--backend", "sage"], 2, "--backend sage", "flash"),
    ([*PROMPT, "--pipefusion", "2", "--attention-schedule", "triton-int8:1:1"], 2, "--pipefusion is 2"),
    ([*PROMPT, "--mesh", "foo=2"], 2, "--mesh has 'foo=2'; ", "batch, ring, ulysses, tensor"),
    ([*PROMPT, "--mesh", ","], 2, "--mesh has ''"),
    ([*PROMPT, "--mesh", "ring=2,ring=3"], 2, "--mesh has two sizes for ring"),
    *[([*PROMPT, "--cache", value], 2, "--cache", value) for value in ("abc", "-1", "inf", "nan")],
    ([*PROMPT, "--offload", "foo"], 2, "--offload is 'foo'"),
    ([*PROMPT, "--resident-blocks", "4"], 2, "--resident-blocks", "'blocks'"),
    ([*PROMPT, "--text-encoders", "foo"], 2, "--text-encoders is 'foo'", "fsdp"),
    ([*PROMPT, "--vae-placement", "foo"], 2, "--vae-placement is 'foo'", "first"),
    ([*PROMPT, "--vae-placement", "first", "--vae"], 2, "--vae-placement is 'first'"),
    ([*PROMPT, "--rotate-method", "foo"], 2, "--rotate-method is 'foo'", "alltoall, allgather, 2d"),
    ([*PROMPT, "--comm-dtype", "foo"], 2, "--comm-dtype is 'foo'", "int8"),
    ([*PROMPT, "--size", "12"], 2, "--size is '12'"),
    ([*PROMPT, "--format", "xyz"], 2, "--format is 'xyz'"),
    ([*PROMPT, "--format", "mp4"], 2, "--format is 'mp4'", "FluxPipeline", "png or jpg or webp"),
    ([*PROMPT, "--steps", "0"], 2, "--steps is 0"),
    ([*PROMPT, "--steps=0"], 2, "--steps is 0"),
    ([*PROMPT, "--frames", "3"], 2, "FluxPipeline has no --frames"),
    ([*PROMPT, "--guidance", "nan"], 2, "--guidance", "nan"),
    *[([*PROMPT, "--fps", value], 2, "--fps") for value in ("0", "1001")],
    ([*PROMPT, "--seed", "-1"], 2, "--seed"),
    ([*PROMPT, "--replicas", "0"], 2, "--replicas 0"),
    ([*PROMPT, "--ranks", "0"], 2, "--ranks 0"),
    ([*PROMPT, "--memory", "0"], 2, "--memory 0"),
    ([*PROMPT, "--timeout", "0"], 2, "--timeout is 0"),
    ([*PROMPT, "--timeout", "inf"], 2, "--timeout", "inf s"),
    ([*PROMPT, "--name", "a/b"], 2, "--name is 'a/b'"),
    ([*PROMPT, "--out", ""], 2, "--out"),
    # Arguments of the call.
    ([*PROMPT, "--set", "stepz=3"], 2, "steps?"),
    ([*PROMPT, "--set", "generator=3"], 2, "FluxPipeline has no --set generator"),
    ([*PROMPT, "--set", "prompt_embeds=[1]"], 2, "FluxPipeline has no --set prompt_embeds"),
    ([*PROMPT, "--set", "steps=3", "--steps", "4"], 2, "--set steps"),
    ([*PROMPT, "--set", "steps=3", "--set", "steps=4"], 2, "--set steps is given twice"),
    ([*PROMPT, "--set", "=3"], 2, "--set =3"),
    ([*PROMPT, "--set", "height=48", "--size", "64x48"], 2, "--size and --set height"),
    ([*PROMPT, "--prompts", "prompts.jsonl"], 2, "--prompt and --prompts"),
    # Files, models and pipelines.
    *[([*PROMPT, "--lora", value], 2, "--lora", f"'{value}'") for value in ("", ":0.5", "a/b:inf")],
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
    (["bench", "--runs", "0"], 2, "--runs"),
    (["bench", "--warmup-runs", "-1"], 2, "--warmup-runs"),
    (["bench", "--steps", "0"], 2, "--steps"),
    (["bench", "--frames", "3"], 2, "--frames"),
    (["bench", "--ranks", "0"], 2, "--ranks"),
    (["bench", "--set", "num_inference_steps=3", "--set", "num_inference_steps=4"], 2, "--set"),
    (["bench", "--model", "/absent"], 1, "'/absent'"),
    (["bench", "--out", "README.md"], 1, "README.md exists"),
    (["bench", "--out", "absent/figures.json"], 1, "absent/figures.json cannot be written"),
    (["bench", "--profile", "README.md"], 1, "--profile README.md"),
    *[
        ([*command, "--mesh", "ring=2,ulysses=1", "--ranks", "4"], 2, "--mesh is too small")
        for command in (PROMPT, ["bench"], ["serve"])
    ],
    (["plan", "--model", "/absent/model"], 1, "'/absent/model'"),
    (["plan", "--model", "zoo"], 1, "model_index.json"),
    (["plan", "--model", "absent.gguf"], 2, "--model is 'absent.gguf'"),
    (["plan", "--model", "/absent.safetensors"], 1, "'/absent.safetensors'"),
    (["plan", "--model", "zoo/flux/pipeline", "--pipeline", "FluxImg2ImgPipelin"], 2, "FluxImg2ImgPipeline?"),
    (["plan", "--model", "zoo/flux/pipeline", "--config", "zoo/video"], 2, "--config is 'zoo/video'"),
]


def answers_to(folder, commands, **variables):
    """Run the command lines in one process, and return its answers. ``variables`` are added to its environment."""
    for name in FILES:
        (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "2000", **variables}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    answers = answers_to(folder, [arguments for arguments, *_ in CASES])
    # Nothing was written.
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return answers


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(arguments) for arguments, *_ in CASES])
def test_error_is_found_before_torch_is_imported(answers, number):
    arguments, code, *words = CASES[number]
    assert answers[number][:2] == [arguments, code], answers[number][2]
    assert [word for word in words if word not in answers[number][2]] == []
    assert answers[number][3] == []


def test_existing_traces_are_found_before_torch_is_imported(tmp_path):
    trace = tmp_path / "rank-1.json.gz"
    trace.touch()
    ((_, code, said, imported),) = answers_to(tmp_path, [["bench", "--ranks", "2", "--profile", str(tmp_path)]])
    assert code == 1
    assert f"{trace} exists" in said
    assert imported == []


def test_ranks_of_torchrun_are_checked_before_torch_is_imported(tmp_path):
    mesh = ["--mesh", "ring=2,ulysses=1"]
    commands = [[*PROMPT, *mesh], ["bench", *mesh], [*PROMPT, "--ranks", "3"]]
    answers = answers_to(tmp_path, commands, RANK="1", WORLD_SIZE="4")
    for _, code, said, imported in answers:
        assert code == 2
        assert "--mesh is too small: 4 ranks" in said or "torchrun started 4 ranks" in said
        assert imported == []
    assert len(answers) == len(commands)
