"""Commands say on stderr what they do before the first step, and Ctrl-C while ranks start prints no traceback."""

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from para_core.cli.app import run
from para_core.cli.progress import _Phases, showing_log, showing_phases
from para_core.progress import component_bytes, logger, readable_bytes, report, reporting_components

TINY_FLUX = Path(__file__).parents[2] / "zoo/flux/pipeline"
DIFFUSERS = logging.getLogger("diffusers.pipelines.pipeline_utils")
SMALL = ["--prompt", "a red circle", "--size", "32x32", "--steps", "1"]


def weights_on_disk(folder):
    return sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))


def test_pipe_gets_a_line_for_each_phase(tmp_path, capsys):
    assert run(["generate", *SMALL, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    total = readable_bytes(weights_on_disk(TINY_FLUX))
    loading = next(index for index, line in enumerate(lines) if f"7 components, {total}" in line)
    loaded = lines[loading + 1 : loading + 8]
    assert [line.split(":")[0] for line in loaded] == [f"loaded component {index} of 7" for index in range(1, 8)]
    transformer = TINY_FLUX / "transformer/diffusion_pytorch_model.safetensors"
    size = readable_bytes(transformer.stat().st_size)
    assert sum(line.endswith(f": transformer ({size})") for line in loaded) == 1
    assert "generating, 1 steps" in lines[loading + 8 :]


def test_terminal_gets_a_bar_that_vanishes():
    screen = io.StringIO()
    phases = _Phases(Console(file=screen, force_terminal=True, width=100))
    phases.emit(logging.makeLogRecord({"msg": "loaded component 1 of 2: vae", "done": 3, "total": 4}))
    phases.close()
    assert "loaded component 1 of 2: vae" in screen.getvalue()
    # The last output of a transient bar erases its line.
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")


def test_reports_reach_nobody_unless_shown(capsys):
    with showing_phases():
        report("seen")
    with showing_phases(shown=False):
        report("hidden on other ranks")
    report("hidden afterwards")
    assert capsys.readouterr().err == "seen\n"
    assert not logger.handlers


def test_diffusers_logger_is_restored_after_an_error():
    before = (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers))
    with pytest.raises(OSError, match="disk"), reporting_components(str(TINY_FLUX), ["vae"]):
        raise OSError("disk")
    assert (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers)) == before


def test_component_bytes_count_one_format(tmp_path):
    for name, size in (("a.safetensors", 5), ("b.safetensors", 7), ("a.bin", 9), ("config.json", 100)):
        (tmp_path / "unet").mkdir(exist_ok=True)
        (tmp_path / "unet" / name).write_bytes(b"x" * size)
    (tmp_path / "scheduler").mkdir()
    assert component_bytes(tmp_path) == {"unet": 12}
    assert component_bytes(None) == {}


def test_model_that_is_not_on_disk_is_to_be_downloaded(capsys):
    with showing_phases(), reporting_components("nobody/no-such-model", ["vae", "unet"]):
        pass
    assert capsys.readouterr().err == "loading nobody/no-such-model: 2 components, to be downloaded\n"


def test_log_of_replicas_is_printed_until_the_end(capsys):
    logger = logging.getLogger("para_core.fleet.group")
    with showing_log(Console(stderr=True)):
        logger.info("replica 1: [ready]")
        logger.debug("hidden")
    logger.info("hidden afterwards")
    assert capsys.readouterr().err == "replica 1: [ready]\n"
