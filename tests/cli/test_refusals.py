"""Refusals of the commands, with exit code and words: before torch, diffusers or transformers are imported."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from para_core.attention.features import OPTIONS_OF_STEPS
from para_core.cli.app import run
from para_core.option_values import BACKENDS, EXACT_FORM, ROTATE_METHODS

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
COMMANDS = (PROMPT, ["bench"], ["serve"], ["plan"])
SCHEDULE = [*PROMPT, "--attention-schedule"]
MISFIT = "--mesh is ring=2, ulysses=1, which does not fit 4 ranks"
# Some commands name them.
FILES = ("README.md", "zoo")
# Each with the exit code and the words that the message has.
CASES = [
    (["generate"], 2, "no prompt"),
    # A bad value of an option.
    *[
        ([*PROMPT, f"--{name}", "foo"], 2, f"--{name} is 'foo'", known)
        for name, known in (
            *(("compile", "no, blocks, whole"), ("weights", "fsdp"), ("dtype", "float16"), ("quantize", "int8")),
            *(("backend", "flash"), ("cross-backend", "flash"), ("offload", "blocks"), ("text-encoders", "fsdp")),
            *(("vae-placement", "first"), ("rotate-method", ", ".join(ROTATE_METHODS)), ("comm-dtype", "int8")),
        )
    ],
    ([*PROMPT, "--weights", "tensor"], 2, "--weights are 'tensor', but the mesh", "--mesh tensor=2"),
    ([*PROMPT, "--attention-backend=foo"], 2, "--backend is 'foo'"),
    ([*SCHEDULE, "fast"], 2, "--attention-schedule fast", ", ".join(BACKENDS)),
    *[([*SCHEDULE, f"{name}=2:4:4"], 2, f"--attention-schedule {name}=2:4:4", "2.0") for name in OPTIONS_OF_STEPS],
    *[([*SCHEDULE, "math", "--backend", name], 2, f"--backend {name}", "flash") for name in EXACT_FORM],
    ([*PROMPT, "--pipefusion", "2", "--attention-schedule", "math:1:1"], 2, "--pipefusion is 2"),
    ([*PROMPT, "--mesh", "foo=2"], 2, "--mesh has 'foo=2'; ", "batch, ring, ulysses, tensor"),
    ([*PROMPT, "--mesh", "ring=2,ring=3"], 2, "--mesh has two sizes for ring"),
    *[([*PROMPT, "--cache", value], 2, "--cache", value) for value in ("abc", "-1", "inf", "nan")],
    ([*PROMPT, "--resident-blocks", "4"], 2, "--resident-blocks is 4 with offload None", "'blocks'"),
    ([*PROMPT, "--vae-placement", "first", "--vae"], 2, "--vae-placement is 'first'"),
    ([*PROMPT, "--size", "12"], 2, "--size is '12'"),
    ([*PROMPT, "--height", "12"], 2, "--height", "--size"),
    ([*PROMPT, "--format", "mp4"], 2, "--format is 'mp4'", "FluxPipeline", "png or jpg or webp"),
    ([*PROMPT, "--frames", "3"], 2, "FluxPipeline has no --frames"),
    ([*PROMPT, "--guidance", "nan"], 2, "--guidance", "nan"),
    *[([*PROMPT, "--fps", value], 2, "--fps") for value in ("0", "1001")],
    ([*PROMPT, "--seed", "-1"], 2, "--seed"),
    *[([*PROMPT, option, "0"], 2, f"{option} 0") for option in ("--replicas", "--ranks")],
    *[([*PROMPT, "--memory", value], 2, f"--memory {value}") for value in ("0", "inf")],
    ([*PROMPT, "--timeout", "inf"], 2, "--timeout", "inf s"),
    *[([*PROMPT, "--name", value], 2, f"--name is '{value}'") for value in ("a/b", "../a", ".a", "")],
    ([*PROMPT, "--name", "é" * 101], 2, "name has 202 bytes; expected at most 200"),
    # Arguments of the call.
    ([*PROMPT, "--set", "stepz=3"], 2, "steps?"),
    ([*PROMPT, "--set", "generator=3"], 2, "FluxPipeline has no --set generator"),
    ([*PROMPT, "--set", "steps=3", "--set", "steps=4"], 2, "--set steps is given twice"),
    ([*PROMPT, "--prompts", "prompts.jsonl"], 2, "--prompt and --prompts"),
    ([*PROMPT, "--steps", "2", "--set", "num_inference_steps=3"], 2, "--steps", "--set num_inference_steps"),
    ([*PROMPT, "--set", "size=64x64", "--set", "width=32"], 2, "--set size", "--set width"),
    # Files, models and pipelines.
    *[([*PROMPT, "--lora", value], 2, "--lora", f"'{value}'") for value in ("", ":0.5", "a/b:inf")],
    ([*PROMPT, "--lora", "absent.safetensors"], 1, "'absent.safetensors'"),
    ([*PROMPT, "--model", "/absent"], 1, "'/absent'"),
    ([*PROMPT, "--model", "README.md"], 2, "--model is 'README.md'"),
    ([*PROMPT, "--pipeline", "FluxImg2ImgPipelin"], 2, "Did you mean FluxImg2ImgPipeline?"),
    ([*PROMPT, "--pipeline", "QwenImagePipeline"], 2, "FluxTransformer2DModel"),
    ([*PROMPT, "--pipeline", "FluxImg2ImgPipeline"], 2, "--image FILE"),
    ([*PROMPT, "--image", "README.md"], 2, "FluxImg2ImgPipeline"),
    ([*PROMPT, "--config", "zoo/flux/pipeline"], 2, "--config is 'zoo/flux/pipeline'"),
    *[(["generate", "--prompts", path], 1, f"{path} cannot be read") for path in ("/absent.jsonl", "/")],
    *[
        (["serve", *options], 2, message)
        for options, message in (
            (["--max-batch", "2", "--cache", "0.1"], "--cache"),
            (["--loras", "/nowhere"], "expected a folder"),
            (["--loras", ".", "--compile", "whole"], "--compile whole"),
            (["--host", "0.0.0.0"], "PARA_CORE_API_KEY"),
            (["--log-level", "loud"], "--log-level loud"),
            (["--config", "/nowhere.yaml"], "cannot be read"),
            (["--max-steps", "0"], "--max-steps 0"),
            (["--request-seconds", "nan"], "--request-seconds nan"),
            *(([name, "inf"], f"{name} inf") for name in ("--keep-hours", "--encoded-prompts")),
            *((["--warmup", size], f"--warmup {size}") for size in ("big", "64", "64x64x0", "64x64xmany")),
            *((["--max-size", size], f"--max-size {size}") for size in ("64", "64x-64", "64x64x", "64x64x²")),
        )
    ],
    (["bench", "--runs", "0"], 2, "--runs"),
    (["bench", "--out", "README.md"], 1, "README.md exists"),
    (["bench", "--out", "absent/figures.json"], 1, "absent/figures.json cannot be written"),
    *[([*line, "--mesh", "ring=2, ulysses=1", "--ranks", "4"], 2, MISFIT) for line in COMMANDS],
    (["plan", "--model", "zoo"], 1, "model_index.json"),
    (["plan", "--model", "/absent.safetensors"], 1, "'/absent.safetensors'"),
    *[
        (["plan", *options], 2, message)
        for options, message in (
            (["--link", "0"], "--link is '0'"),
            (["--dtype", "float32"], "--dtype is 'float32'"),
            (["--device", "rtx 5900"], "did you mean RTX 5090"),
            (["--pipeline", "FluxFillPipeline"], "--pipeline is 'FluxFillPipeline'"),
            (["--size", "large"], "large"),
        )
    ],
    (["doctor", "--config", "owner/name"], 2, "owner/name"),
]


def answers_to(folder, commands, **variables):
    """Run the command lines in one process, and return its answers. ``variables`` are added to its environment."""
    for name in FILES:
        (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "2000", "PARA_CORE_API_KEY": "", **variables}
    options = {"capture_output": True, "text": True, "cwd": folder, "env": environment}
    result = subprocess.run([sys.executable, "-c", PROBE], input=json.dumps(commands), check=True, **options)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    answers = answers_to(folder, [arguments for arguments, *_ in CASES])
    # Nothing was written.
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return answers


@pytest.mark.parametrize("number", range(len(CASES)), ids=["_".join(arguments)[:60] for arguments, *_ in CASES])
def test_error_is_found_before_torch_is_imported(answers, number):
    arguments, code, *words = CASES[number]
    assert answers[number][:2] == [arguments, code], answers[number][2]
    assert [word for word in words if word not in answers[number][2]] == []
    assert answers[number][3] == []


def test_ranks_of_torchrun_and_existing_traces_are_checked_before_torch_is_imported(tmp_path):
    trace = tmp_path / "rank-1.json.gz"
    trace.touch()
    mesh, ranks = ["--mesh", "ring=2,ulysses=1"], "torchrun started 4 ranks"
    commands = {
        ("bench", "--ranks", "4", "--profile", str(tmp_path)): (1, f"{trace} exists"),
        **dict.fromkeys(((*PROMPT, *mesh), ("bench", *mesh)), (2, MISFIT)),
        (*PROMPT, "--ranks", "3"): (2, ranks),
    }
    answers = answers_to(tmp_path, list(commands), RANK="1", WORLD_SIZE="4")
    for (code, words), (_, answered, said, imported) in zip(commands.values(), answers, strict=True):
        assert (answered, words in said, imported) == (code, True, []), said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # The model makes images, so that the request itself is refused.
        pytest.param(["serve", "--warmup", "64x64x9"], "--warmup 64x64x9.*frames", id="serve_--warmup"),
        (["doctor", "--cpu", "--ring", "0"], "--ring is 0"),
        ([*PROMPT, "--ranks", "3"], "2 GPUs"),
        ([*PROMPT, "--size", "16x16400", "--format", "webp"], "^error: --size is 16400.* webp .* 16383"),
        ([*PROMPT, "--set", "true_cfg_scale=high"], "^error: --set true_cfg_scale .*'high'"),
    ],
)
def test_error_is_found_before_the_model_is_loaded(monkeypatch, tmp_path, capsys, arguments, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("para_core.fleet.rank.build", lambda *_: 1 / 0)
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert re.search(words, capsys.readouterr().err, re.M)
