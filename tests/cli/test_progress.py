"""Commands say on stderr what they do before the first step."""

import logging

import pytest
from rich.console import Console

from para_core.cli.progress import announce_imports, showing_log, showing_phases
from para_core.progress import logger, report, report_components

DIFFUSERS = logging.getLogger("diffusers.pipelines.pipeline_utils")


def test_reports_reach_nobody_unless_shown(capsys, monkeypatch):
    before = (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers))
    monkeypatch.setenv("RANK", "1")  # as a cluster may: without WORLD_SIZE it is no rank of torchrun
    announce_imports()
    with showing_phases():
        report("seen")
        with report_components("nobody/no-such-model", ["vae", "unet"]):
            pass
        with pytest.raises(OSError, match="disk"), report_components("nobody/no-such-model", ["vae"]):
            raise OSError("disk")
    with showing_phases(shown=False):
        report("hidden on other ranks")
    report("hidden afterwards")
    replicas = logging.getLogger("para_core.fleet.group")
    with showing_log(Console(stderr=True)):
        replicas.info("replica 1: [ready]")
        replicas.debug("hidden")
    replicas.info("hidden afterwards")
    phases = ["seen", *[f"loading nobody/no-such-model: {count} components, to be downloaded" for count in (2, 1)]]
    assert capsys.readouterr().err.splitlines() == ["importing torch and diffusers", *phases, "replica 1: [ready]"]
    # In a terminal brackets are no markup.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with showing_phases():
        report("loading [/model]")
    assert "loading [/model]" in capsys.readouterr().err
    assert not logger.handlers
    assert (DIFFUSERS.level, DIFFUSERS.propagate, list(DIFFUSERS.handlers)) == before
