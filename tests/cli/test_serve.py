"""The options of ``para_core serve``, without starting replicas."""

import logging
import re

import pytest

from para_core.adapters import AttentionSchedule
from para_core.cli.app import run
from para_core.fleet.http import host_server


@pytest.fixture
def started(monkeypatch):
    """Return the arguments of each call that would start the server."""
    calls = []

    def start(model, recipe, options, replica_options, **rest):
        arguments = {"model": model, "recipe": recipe, "options": options, "replica": replica_options}
        calls.append({**arguments, "level": logging.getLogger("para_core").level, **rest})
        raise RuntimeError("stop here")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(host_server, "serve", start)
    return calls


def test_config_file_sets_options_that_the_line_does_not(started, tmp_path, capsys):
    config = tmp_path / "serve.yaml"
    text = "port: 8123\nmax-batch: 4\nmax_steps: 30\nwarmup: [64x64, 32x64]\ncors: https://a.example\nweights: fsdp\n"
    text += "attention-schedule: triton-int8:1:2\nout: videos\nkeep-hours: 2\n"
    config.write_text(text)
    assert run(["serve", "--config", str(config), "--port", "8124", "--request-log", str(tmp_path / "log")]) == 1
    (call,) = started
    assert (call["port"], call["options"].steps, call["options"].max_batch) == (8124, 30, 4)
    assert (call["recipe"].weights, call["recipe"].timeout) == ("fsdp", 600)
    assert call["recipe"].backend == AttentionSchedule("triton-int8", first=1, last=2)
    assert call["options"].cors == ("https://a.example",)
    assert [request.size for request in call["replica"].warmup] == ["64x64", "32x64"]
    assert (call["replica"].prompt_bytes, call["options"].keep_hours) == (10**9, 2)
    assert call["options"].request_log == tmp_path / "log"


@pytest.mark.parametrize(
    ("arguments", "seed", "level"),
    [
        ([], None, logging.INFO),
        (["--seed", "0", "--log-level", "error"], 0, logging.ERROR),
        (["--seed", "7", "--log-level", "DEBUG"], 7, logging.DEBUG),
    ],
)
def test_seed_and_level_of_the_log(started, arguments, seed, level):
    package = logging.getLogger("para_core")
    before = (package.level, list(package.handlers))
    assert run(["serve", *arguments]) == 1
    (call,) = started
    assert (call["options"].seed, call["level"]) == (seed, level)
    assert (package.level, package.handlers) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot'"),
        ("- a", "port: 8000"),
        ("a: [", "no YAML"),
        ("port: many", "port"),
        ("config: x", "'x'"),
        ("config: y.yaml", "'y.yaml'"),
    ],
)
def test_bad_config_file_is_named(started, tmp_path, capsys, text, message):
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    assert run(["serve", "--config", str(config)]) == 2
    assert message in capsys.readouterr().err
    assert not started


def test_class_and_those_that_serve_other_routes_reach_the_server(started, capsys):
    assert run(["serve", "--pipeline", "FluxInpaintPipeline", "--warmup", "32x32"]) == 1
    (call,) = started
    assert (call["recipe"].pipeline, call["model"].required) == ("FluxInpaintPipeline", ("image", "mask_image"))
    assert call["model"].others == ("FluxPipeline",)
    assert call["replica"].warmup[0].images.keys() == {"image", "mask_image"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batch", "2", "--cache", "0.1"], "--cache"),
        (["--loras", "/nowhere"], "expected a folder"),
        (["--loras", ".", "--compile", "whole"], "--compile whole"),
        (["--resident-blocks", "4"], "--resident-blocks is 4"),
        (["--resident-blocks", "1", "--offload", "model"], "--resident-blocks is 1"),
        (["--warmup", "64"], "--warmup 64"),
        (["--warmup", "64x64x0"], "--warmup 64x64x0"),
        (["--warmup", "64x64xmany"], "--warmup 64x64xmany"),
        (["--max-size", "64"], "--max-size 64"),
        (["--max-size", "64x-64"], "--max-size 64x-64"),
        (["--max-size", "64x64x"], "--max-size 64x64x"),
        (["--max-size", "64x64x²"], "--max-size 64x64x²"),
        (["--max-size", "64x64x" + "9" * 5000], "--max-size"),
        (["--host", "0.0.0.0"], "PARA_CORE_API_KEY"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "9223372036854775808"], "--seed"),
        (["--log-level", "loud"], "--log-level loud"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(started, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("PARA_CORE_API_KEY", raising=False)
    assert run(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("arguments", "pixels"),
    [([], 2048 * 2048), (["--max-size", "64x32"], 64 * 32), (["--max-size", "64x32x9"], 64 * 32 * 9)],
)
def test_largest_size_and_replicas_reach_the_server(started, arguments, pixels):
    assert run(["serve", "--replicas", "3", *arguments]) == 1
    (call,) = started
    assert (call["options"].pixels, call["replicas"]) == (pixels, 3)


def test_size_with_frames_is_warmed_up_with_them(started, capsys):
    # The model makes images, so that the request itself is refused.
    assert run(["serve", "--warmup", "64x64x9"]) == 2
    message = capsys.readouterr().err
    assert "--warmup 64x64x9" in message and "frames" in message


def test_debug_and_spread_reach_the_server(started):
    assert run(["serve", "--replicas", "3", "--spread"]) == 1
    (call,) = started
    assert (call["replicas"], call["replica"].spread, call["debug"]) == (3, True, False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--queue", "-1"], "--queue -1 .*0"),
        (["--max-steps", "0"], "--max-steps 0 .*0"),
        (["--request-seconds", "nan"], "--request-seconds nan.*0"),
        (["--memory", "0"], "--memory 0.*0 GB"),
        (["--replicas", "0"], "--replicas 0.*1"),
    ],
)
def test_impossible_limits_name_their_options(options, says, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["serve", *options]) != 0
    assert re.search(says, capsys.readouterr().err)
