"""Warnings about a negative prompt, or a true_cfg_scale, that the pipeline does not use."""

import json

import diffusers
import pytest
from diffusers import FluxPipeline

from para_core.cli.app import run
from para_core.fleet.no_effect import warnings_of
from para_core.fleet.pipeline_info import describe
from para_core.fleet.request import make_request
from tests.fleet.test_seeds import as_form
from tests.fleet.test_server import PATH, ask, serving

NEGATIVE = {"negative_prompt": "text"}


@pytest.mark.parametrize(
    ("pipeline", "fields", "named"),
    [
        ("FluxPipeline", NEGATIVE, "true_cfg_scale"),
        ("FluxPipeline", {**NEGATIVE, "true_cfg_scale": 1}, "true_cfg_scale"),
        ("FluxPipeline", {**NEGATIVE, "guidance_scale": 5.0}, "true_cfg_scale"),
        ("FluxPipeline", {**NEGATIVE, "true_cfg_scale": 1.5}, None),
        ("FluxPipeline", {"negative_prompt_2": "text"}, "negative_prompt_2"),
        ("FluxPipeline", {"negative_prompt": " "}, None),
        ("FluxPipeline", {"negative_prompt": None}, None),
        ("FluxPipeline", {"true_cfg_scale": 4.0}, "negative_prompt"),
        ("FluxPipeline", {"true_cfg_scale": 4.0, "negative_prompt": ""}, None),
        ("FluxPipeline", {}, None),
        ("QwenImagePipeline", NEGATIVE, None),
        ("QwenImagePipeline", {**NEGATIVE, "true_cfg_scale": 1.0}, "true_cfg_scale"),
        ("QwenImagePipeline", {}, None),
        ("HunyuanVideoPipeline", NEGATIVE, "true_cfg_scale"),
        ("StableDiffusion3Pipeline", NEGATIVE, None),
        ("StableDiffusion3Pipeline", {**NEGATIVE, "guidance_scale": 1.0}, "guidance_scale"),
        ("StableDiffusion3Pipeline", {**NEGATIVE, "guidance_scale": 0}, "guidance_scale"),
        ("WanPipeline", {**NEGATIVE, "guidance_scale": 1.0}, "guidance_scale"),
        ("ZImagePipeline", {**NEGATIVE, "guidance_scale": 0.5}, None),
        ("ZImagePipeline", {**NEGATIVE, "guidance_scale": 0.0}, "guidance_scale"),
        ("LTX2Pipeline", {**NEGATIVE, "guidance_scale": 1.0}, None),
        ("LTX2Pipeline", {**NEGATIVE, "guidance_scale": 1.0, "audio_guidance_scale": 1.0}, "guidance_scale"),
        ("ChromaPipeline", NEGATIVE, None),
    ],
)
def test_warning_names_the_scale(pipeline, fields, named):
    model = describe("", getattr(diffusers, pipeline), {})
    warnings = warnings_of(make_request({"prompt": "a", **fields}, model), model)
    assert len(warnings) == (named is not None)
    assert named is None or named in warnings[0]


def test_answers_and_the_log_have_the_warning(caplog):
    with serving(pipeline=FluxPipeline) as (port, _):
        plain = ask(port, {"prompt": "a"})[2]
        json_ = ask(port, {"prompt": "a", **NEGATIVE})[2]
        form = ask(port, path=PATH, **as_form(prompt="a", **NEGATIVE))[2]
        stream = ask(port, {"prompt": "a", **NEGATIVE, "stream": True})[2]
    event = json.loads(stream.decode().split("data: ")[1])
    assert plain["warnings"] == []
    for answer in (json_, form, event):
        (warning,) = answer["warnings"]
        assert "true_cfg_scale" in warning
    assert sum("true_cfg_scale" in record.getMessage() for record in caplog.records) == 3


def test_command_prints_the_warning_once(capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\nc\n")
    command = ["generate", "--negative-prompt", "text", "--dry-run", "--out", str(tmp_path)]
    assert run([*command, "--prompts", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1
    assert "true_cfg_scale" in lines[0]
    assert run([*command, "--prompt", "a", "--set", "true_cfg_scale=2"]) == 0
    assert "warning: " not in capsys.readouterr().out
