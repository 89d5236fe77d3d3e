"""Time limits in `make gpu-check`, of sections, of all of them and of resumed runs, and the exit codes."""

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.attention import single_device as attention
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import local_attention, runner, two_ranks
from benchmarks.gpu.job import SectionJob, section_environment, write_section
from benchmarks.gpu.processes import run_in_pool
from benchmarks.gpu.runner import SECTIONS, Section, run_all

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_section_limit_covers_its_parts(section):
    needs = importlib.import_module(section.path).NEEDS
    assert needs and all(seconds > 0 for seconds in needs.values())
    assert section.seconds >= runner.START + sum(needs.values()) + runner.END


def test_all_sections_fit_into_45_minutes():
    assert runner.ALL <= 45 * 60
    assert sum(section.seconds + runner._PATIENCE for section in SECTIONS) <= runner.ALL
    assert all(runner._LEAST <= section.seconds <= runner.LONGEST for section in SECTIONS)
    # This also fits if a call has 9.5 minutes for everything.
    assert runner.LONGEST + 2 * runner._PATIENCE <= 9.6 * 60


def test_runner_lists_parts_without_importing_them():
    parts = {section.name: section.parts for section in SECTIONS}
    assert parts["two_ranks"] == tuple(two_ranks.PARTS)
    assert set(parts["local"]) == set(local_attention.BACKENDS)
    code = "import sys, benchmarks.gpu.__main__; print([x for x in ('para_core', 'diffusers') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def result(section, status="done", verdicts=(), out_of_time=()):
    verdicts = {verdict: verdicts.count(verdict) for verdict in verdicts}
    return {
        "section": section, "status": status, "seconds": 0.0, "verdicts": verdicts, "error": None, "left out": [],
        "out of time": list(out_of_time), "rows": [], "environment": section_environment(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "verdicts", "code"),
    [
        ("done", ("ok", "refused"), 0),
        ("skipped", (), 0),
        ("done", ("ok", "wrong"), 1),
        ("killed", ("ok", "wrong"), 1),
        ("killed", ("ok",), 3),
        ("failed", (), 3),
        ("done", ("ok", "failed"), 3),
    ],
)
def test_exit_code_is_1_for_wrong_numbers_only(monkeypatch, tmp_path, status, verdicts, code):
    results = {"local": result("local"), "flux": result("flux", status, verdicts)}
    monkeypatch.setattr(command, "run_all", lambda *args, **options: results)
    assert command.main(["--device", "cpu", "--tiny", "--output", str(tmp_path)]) == code


@pytest.fixture
def clock(monkeypatch):
    """Return sections that take ``used`` of their limit on a stand-in clock, and collect (name, limit)."""
    now, ran = [0.0], []
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])

    def run(section, output, *, device, tiny, seconds):
        ran.append((section.name, seconds))
        now[0] += clock_used[0] * (seconds + runner._PATIENCE)
        content = result(section.name)
        output.mkdir(exist_ok=True)
        (output / f"{section.name}.json").write_text(json.dumps(content))
        return content

    clock_used = [1.0]
    monkeypatch.setattr(runner, "run_section", run)
    return now, ran, clock_used


@pytest.mark.parametrize("used", [1.0, 0.3])
def test_calls_of_10_minutes_finish_all_sections(clock, tmp_path, used):
    now, ran, clock_used = clock
    clock_used[0] = used
    calls = 0
    while len(ran) < len(SECTIONS):
        start = now[0]
        run_all(SECTIONS, tmp_path, device="cpu", tiny=True, seconds=9.7 * 60, resume=True)
        assert now[0] - start <= 9.7 * 60
        calls += 1
        assert calls <= 6
    assert sorted(ran) == sorted((section.name, section.seconds) for section in SECTIONS)
    assert now[0] <= runner.ALL


def test_too_long_section_is_skipped_for_a_shorter(clock, tmp_path, capsys):
    _, ran, _ = clock
    sections = (Section("first", 60), Section("long", 200), Section("short", 30))
    results = run_all(sections, tmp_path, device="cpu", tiny=True, seconds=220)
    assert ran == [("first", 60), ("short", 30)]
    assert results["long"]["status"] == "skipped"
    assert "long: skipped" in (printed := capsys.readouterr().out) and "out of time" in printed
    assert runner.finished(sections[1], tmp_path) is None


def test_section_longer_than_run_gets_the_rest(clock, tmp_path):
    _, ran, _ = clock
    run_all((Section("long", 500),), tmp_path, device="cpu", tiny=True, seconds=240)
    assert ran == [("long", 240 - runner._PATIENCE)]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"status": "skipped"}, True),
        ({"status": "failed"}, False),
        ({"status": "killed"}, False),
        ({"out of time": ["the last case"]}, False),
        ({"environment": {**section_environment(), "device": "another one"}}, False),
    ],
)
def test_resumed_run_keeps_finished_sections(clock, tmp_path, change, kept):
    _, ran, _ = clock
    (tmp_path / "local.json").write_text(json.dumps(result("local") | change))
    results = run_all((Section("local", 60),), tmp_path, device="cpu", tiny=True, seconds=100, resume=True)
    assert ran == ([] if kept else [("local", 60)])
    assert results["local"]["section"] == "local"


def test_half_a_file_or_none_is_not_finished(tmp_path):
    assert runner.finished(Section("local", 60), tmp_path) is None
    (tmp_path / "local.json").write_text('{"section": "lo')
    assert runner.finished(Section("local", 60), tmp_path) is None


def test_unfinished_parts_are_in_the_file(tmp_path):
    job = SectionJob("flux", CPU, False, tmp_path / "flux.json", time.monotonic() + 50)
    assert job.has_time("short", 10.0) and not job.has_time("long", 100.0)
    job.write("done")
    (line,) = json.loads(job.file.read_text())["out of time"]
    assert "long" in line and "100" in line
    assert job.asked == {"short": 10.0, "long": 100.0}


def test_attention_asks_for_time_before_each_way():
    size = replace(attention.TINY[0], dtype="float32")
    checks, called = [], []

    def ways(tensors, size):
        return {name: lambda name=name: called.append(name) or tensors[0] for name in ("first", "second", "third")}

    def enough_time():
        checks.append(len(called))
        return len(checks) <= 2  # The checks are of the size, and of its first way.

    rows = list(attention.measure([size], CPU, ways=ways, enough_time=enough_time))
    assert set(called) == {"first"}
    assert [row["way"] for row in rows if "left out" in row] == ["second", "third"]
    assert len(checks) == 4


def test_written_section_names_killed_processes(tmp_path):
    write_section(tmp_path / "x.json", "x", "killed", 1.0, [], [], "killed after 1 s", out_of_time=[])
    lines = runner.summary(json.loads((tmp_path / "x.json").read_text()))
    assert lines[0].startswith("x: killed") and "killed after 1 s" in lines[1]


def fine(device):
    torch.ones(1, device=device)


def raise_error(device):
    raise ValueError("no kernel")


def hang(device):
    time.sleep(600)


@pytest.mark.long
def test_slow_compilation_is_named_and_stops_no_other(tmp_path):
    job = SectionJob("attention", CPU, True, tmp_path / "job.json", time.monotonic() + 600)
    tasks = [("fine", fine, ()), ("raises", raise_error, ()), ("hangs", hang, ())]
    # A process takes longer to start on a busy machine.
    assert run_in_pool(job, tasks[:1], seconds=300.0) == {}
    limit = 20.0 + 3 * job.rows[0]["seconds"]
    missing = run_in_pool(job, tasks, seconds=limit)
    assert missing.keys() == {"raises", "hangs"}
    assert missing["raises"] == "ValueError: no kernel" and f"{limit:.0f} s" in missing["hangs"]
    assert job.rows[1]["compiled"] == 1
