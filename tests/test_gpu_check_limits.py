"""Time limits in `make gpu-check`, of sections, of all of them and of resumed runs, and the exit codes."""

import importlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.attention import single_device as attention
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import local_attention, runner, two_ranks
from benchmarks.gpu.job import SectionJob, section_environment
from benchmarks.gpu.processes import run_in_pool
from benchmarks.gpu.runner import SECTIONS, Options, Section, run_all

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
REAL = Options("cpu")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_section_limits_cover_its_parts(section):
    needs = importlib.import_module(section.path).NEEDS
    assert needs and all(seconds > 0 for seconds in needs.values())
    assert section.seconds >= runner.START + sum(needs.values()) + runner.END
    assert section.seconds >= section.first >= runner.START + next(iter(needs.values())) + runner.END


def test_first_two_rounds_fit_into_a_small_lease():
    """Check that --minutes 9 finishes the first round, whatever its sections take, and --minutes 4 the second."""
    seconds = {
        number: sum(section.seconds + runner._PATIENCE for section in SECTIONS if section.round == number)
        for number in (1, 2, 3)
    }
    assert seconds[1] <= 9 * 60 - runner._PATIENCE
    assert seconds[2] <= 4 * 60 - runner._PATIENCE
    assert sum(seconds.values()) == runner.ALL <= 30 * 60


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
        "out of time": list(out_of_time), "rows": [], "environment": section_environment(), "options": asdict(REAL),
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

    def run(section, output, options, *, seconds):
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
def test_two_calls_of_9_and_4_minutes_answer_the_first_questions(clock, tmp_path, used):
    now, ran, clock_used = clock
    clock_used[0] = used
    # The rest of the first call goes to sections whose first step fits. In the second call they get what they need.
    run_all(SECTIONS, tmp_path, REAL, seconds=9 * 60, resume=True)
    assert now[0] <= 9 * 60
    assert ran[:5] == [(section.name, section.seconds) for section in SECTIONS if section.round == 1]
    ran.clear()
    for section in SECTIONS:
        if section.round == 2:
            (tmp_path / f"{section.name}.json").unlink(missing_ok=True)
    start = now[0]
    run_all(SECTIONS, tmp_path, REAL, seconds=4 * 60, resume=True)
    assert now[0] - start <= 4 * 60
    assert ran[:2] == [(section.name, section.seconds) for section in SECTIONS if section.round == 2]


def test_section_starts_if_its_first_step_fits(clock, tmp_path, capsys):
    _, ran, _ = clock
    sections = (section_of("first", 60, 30), section_of("long", 200, 40), section_of("short", 45, 35))
    results = run_all(sections, tmp_path, REAL, seconds=100)
    # The first takes 62 s with the patience of the runner, and 2 s are kept for that of the next one.
    assert ran == [("first", 60), ("short", 36)]
    assert results["long"]["status"] == "skipped"
    assert "long: skipped" in (printed := capsys.readouterr().out) and "out of time" in printed
    assert not runner._is_finished(results["long"])
    ran.clear()
    run_all(sections[1:2], tmp_path, REAL, seconds=100)
    assert ran == [("long", 98)]


def section_of(name, seconds=60, first=20, **options):
    return Section(name, seconds, first, 1, **options)


def test_failed_sections_come_last_in_a_resumed_run(clock, tmp_path):
    _, ran, _ = clock
    states = {"broken": "failed", "stuck": "killed", "good": "done", "left": "skipped"}
    for name, status in states.items():
        late = ["all of it"] if status == "skipped" else []
        (tmp_path / f"{name}.json").write_text(json.dumps(result(name, status, out_of_time=late)))
    sections = tuple(section_of(name) for name in [*states, "new"])
    run_all(sections, tmp_path, REAL, seconds=1000, resume=True)
    assert [name for name, _ in ran] == ["left", "new", "broken", "stuck"]


STEPS = """
import os, time
def run(job):
    for name, seconds in (("quick", 0.5), ("slow", 1000.0), ("quick again", 0.5)):
        if job.has_time(name, seconds):
            job.add(step=name)
    if os.environ.get("HANG"):
        time.sleep(600)
"""


@pytest.fixture
def stepping(tmp_path, monkeypatch):
    """Return a section of three steps, of which one does not fit."""
    (tmp_path / "stepping_section.py").write_text(STEPS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return section_of("steps", 60, 5, module="stepping_section")


def test_steps_that_do_not_fit_are_written_as_out_of_time(tmp_path, stepping):
    content = run_all((stepping,), tmp_path, Options("cpu"), seconds=100)["steps"]
    assert content["status"] == "done"
    assert [row["step"] for row in content["rows"]] == ["quick", "quick again"]
    (late,) = content["out of time"]
    assert late.startswith("slow") and "1000" in late
    assert not runner._is_finished(content)
    assert runner.exit_code({"steps": content}) == 0


def test_rows_are_in_the_file_while_the_section_runs(tmp_path, stepping, monkeypatch):
    """Check that a call that is killed from outside leaves the rows that came before."""
    monkeypatch.setenv("HANG", "1")
    code = f"""
from pathlib import Path
from benchmarks.gpu.runner import Options, Section, run_all

section = Section("steps", 60, 5, 1, module="stepping_section")
run_all((section,), Path({str(tmp_path)!r}), Options("cpu"), seconds=100)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    file, content = tmp_path / "steps.json", {"rows": []}
    deadline = time.monotonic() + 60
    while len(content["rows"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        content = json.loads(file.read_text()) if file.exists() else content
    process.send_signal(signal.SIGTERM)
    process.wait()
    content = json.loads(file.read_text())
    assert [row["step"] for row in content["rows"]] == ["quick", "quick again"]
    assert content["status"] == "began"
    assert not runner._is_finished(content)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"status": "skipped"}, True),
        ({"status": "failed"}, False),
        ({"status": "killed"}, False),
        ({"out of time": ["the last case"]}, False),
        ({"environment": {**section_environment(), "device": "another one"}}, False),
        ({"options": asdict(replace(REAL, tiny=True))}, False),
    ],
)
def test_resumed_run_keeps_finished_sections(clock, tmp_path, change, kept):
    _, ran, _ = clock
    (tmp_path / "local.json").write_text(json.dumps(result("local") | change))
    results = run_all((section_of("local"),), tmp_path, REAL, seconds=100, resume=True)
    assert ran == ([] if kept else [("local", 60)])
    assert results["local"]["section"] == "local"


def test_resumed_run_without_time_keeps_earlier_rows(clock, tmp_path):
    _, ran, _ = clock
    earlier = result("flux", "killed") | {"rows": [{"ms": 1.0}], "out of time": ["a step"]}
    (tmp_path / "flux.json").write_text(json.dumps(earlier))
    results = run_all((section_of("flux", 60, 50),), tmp_path, REAL, seconds=40, resume=True)
    assert ran == [] and results["flux"] == earlier == json.loads((tmp_path / "flux.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "at least 0.7"),
        (["--minutes", "-3"], "at least 0.7"),
        (["--minutes", "nan"], "at least 0.7"),
        (["--minutes", "1", "--sections", "local"], "at least 2.1"),
        (["--device", "mps"], "cuda:1"),
        (["--device", "cuda:x"], "cuda:1"),
        (["--device", "cpu"], "--tiny"),
        (["--output", __file__], "a folder"),
        (["--sections", "fluxx"], "invalid choice"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(command, "run_all", lambda *args, **options: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as exit_of:
        command.main(arguments)
    assert exit_of.value.code == 2
    assert message in capsys.readouterr().err


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
