"""The options of ``para_core serve``, without starting replicas. For those that are refused see test_refusals.py."""

import json
import logging

import pytest

from para_core.adapters import AttentionSchedule
from para_core.cli.app import run
from para_core.fleet.http import host_server
from para_core.fleet.image_files import open_image


@pytest.fixture
def start(monkeypatch):
    """Return a function of command-line options that returns the arguments of the call that would start the server."""
    calls = []

    def serve(model, recipe, options, replica_options, **rest):
        arguments = {"model": model, "recipe": recipe, "options": options, "replica": replica_options}
        calls.append({**arguments, "level": logging.getLogger("para_core").level, **rest})
        raise RuntimeError("stop here")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(host_server, "run_server", serve)

    def start(*options):
        assert run(["serve", *options]) == 1
        return calls.pop()

    return start


def test_config_file_sets_options_that_the_line_does_not(start, tmp_path):
    config = tmp_path / "serve.yaml"
    text = "port: 8123\nmax-batch: 4\nmax_steps: 30\nwarmup: [64x64, 32x64]\ncors: https://a.example\nweights: fsdp\n"
    text += "attention-schedule: math:1:2\nout: videos\nkeep-hours: 2\nmax-size: 64x32\nreplicas: 3\nspread: true\n"
    config.write_text(text)
    call = start("--config", str(config), "--port", "8124", "--request-log", str(tmp_path / "log"))
    assert (call["port"], call["options"].steps, call["options"].max_batch) == (8124, 30, 4)
    assert (call["recipe"].weights, call["recipe"].timeout) == ("fsdp", 600)
    assert call["recipe"].backend == AttentionSchedule("math", first=1, last=2)
    assert call["options"].cors == ("https://a.example",)
    assert [request.size for request in call["replica"].warmup] == ["64x64", "32x64"]
    assert (call["replica"].prompt_bytes, call["options"].keep_hours) == (10**9, 2)
    assert call["options"].request_log == tmp_path / "log"
    assert (call["options"].pixels, call["replicas"], call["replica"].spread) == (64 * 32, 3, True)


def test_seed_and_level_of_the_log_and_a_key_of_spaces_is_none(start, monkeypatch):
    monkeypatch.setenv("PARA_CORE_API_KEY", " \n")
    package = logging.getLogger("para_core")
    before = (package.level, list(package.handlers))
    for arguments, seed, level in (
        ([], None, logging.INFO),
        (["--seed", "0", "--log-level", "error"], 0, logging.ERROR),
        (["--seed", "7", "--log-level", "DEBUG"], 7, logging.DEBUG),
    ):
        call = start(*arguments)
        assert (call["options"].seed, call["level"], call["options"].api_key) == (seed, level, None)
        assert (call["options"].pixels, call["debug"], call["replica"].spread) == (2048 * 2048, False, False)
        assert (package.level, package.handlers) == before


def test_class_and_those_that_serve_other_routes_reach_the_server(start, tmp_path):
    call = start("--pipeline", "FluxInpaintPipeline", "--warmup", "32x32")
    assert (call["recipe"].pipeline, call["model"].required) == ("FluxInpaintPipeline", ("image", "mask_image"))
    assert call["model"].others == ("FluxPipeline",)
    assert call["replica"].warmup[0].images.keys() == {"image", "mask_image"}
    # This class takes the size of its image.
    index = {"_class_name": "StableDiffusionImg2ImgPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (request,) = start("--model", str(tmp_path), "--warmup", "32x16")["replica"].warmup
    assert (request.size, open_image(request.images["image"][0]).size) == ("auto", (32, 16))
