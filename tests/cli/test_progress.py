"""Commands say on stderr what they do before the first step."""

import io
import logging

import pytest
from rich.console import Console

from para_core.cli.progress import _Phases, showing_log, showing_phases
from para_core.progress import component_bytes, logger, report, reporting_components

DIFFUSERS = logging.getLogger("diffusers.pipelines.pipeline_utils")


def test_terminal_gets_a_bar_that_vanishes():
    screen = io.StringIO()
    phases = _Phases(Console(file=screen, force_terminal=True, width=100))
    phases.emit(logging.makeLogRecord({"msg": "loaded component 1 of 2: vae", "done": 3, "total": 4}))
    phases.close()
    assert "loaded component 1 of 2: vae" in screen.getvalue()
    # The last output of a transient bar erases its line.
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")


def test_reports_reach_nobody_unless_shown(capsys):
    before = (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers))
    with showing_phases():
        report("seen")
        with reporting_components("nobody/no-such-model", ["vae", "unet"]):
            pass
        with pytest.raises(OSError, match="disk"), reporting_components("nobody/no-such-model", ["vae"]):
            raise OSError("disk")
    with showing_phases(shown=False):
        report("hidden on other ranks")
    report("hidden afterwards")
    replicas = logging.getLogger("para_core.fleet.group")
    with showing_log(Console(stderr=True)):
        replicas.info("replica 1: [ready]")
        replicas.debug("hidden")
    replicas.info("hidden afterwards")
    loading = [f"loading nobody/no-such-model: {count} components, to be downloaded" for count in (2, 1)]
    assert capsys.readouterr().err.splitlines() == ["seen", *loading, "replica 1: [ready]"]
    assert not logger.handlers
    assert (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers)) == before


def test_component_bytes_count_one_format(tmp_path):
    (tmp_path / "unet").mkdir()
    for name, size in (("a.safetensors", 5), ("b.safetensors", 7), ("a.bin", 9), ("config.json", 100)):
        (tmp_path / "unet" / name).write_bytes(b"x" * size)
    (tmp_path / "scheduler").mkdir()
    assert (component_bytes(tmp_path), component_bytes(None)) == ({"unet": 12}, {})
