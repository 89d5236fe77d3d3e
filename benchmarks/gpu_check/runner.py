"""The sections one after the other, each in processes of its own with a time limit of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.job import WRONG, write_section

# Characters of what a process printed that go into the JSON of a section that did not end well.
_LAST_WORDS = 4000
# After its limit a process is given so long to say where it is.
_PATIENCE = 2.0  # seconds
# A process needs so long to import torch: nothing is begun that could do no more.
_LEAST = 10.0  # seconds


# Of all sections together, unless told otherwise.
ALL = 480.0  # seconds


@dataclass(frozen=True)
class Section:
    """A module with a function ``run(job)``.

    Args:
        seconds: at most.
        parts: run at the same time, a process each (tiny: the first and the last); what is timed has none.
        module: where it is not the section's own name in this package.
        takes_the_rest: beside its own seconds, those that were not used before it.
    """

    name: str
    seconds: float
    parts: tuple[str, ...] = ("",)
    module: str = ""
    takes_the_rest: bool = False

    @property
    def path(self) -> str:
        return self.module or f"benchmarks.gpu_check.{self.name}"


# What decides most comes first. Each has its seconds whatever those before it do: with what ends a process that hangs, they add up to no
# more than ALL. What does not fit into them is left out, and said to be.
SECTIONS = (
    Section("local", 60, ("flash", "efficient", "math", "cudnn")),
    Section("gradients_16_bit", 20),
    Section("small_kernels", 30),
    Section("ranks", 60),
    Section("sync", 25),
    Section("nccl", 35),
    Section("share", 35),
    Section("vae", 30),
    Section("attention", 75),
    Section("attention_hopper", 28),
    Section("flux", 60, takes_the_rest=True),
)


@dataclass
class _Process:
    part: str
    file: Path
    log: Path
    process: subprocess.Popen[bytes]
    timed_out: bool = False


def run_section(section: Section, output: Path, *, device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """Run ``section`` for at most ``seconds``, write ``output/<name>.json``; returns what is in it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        parts = section.parts[:: len(section.parts) - 1 or 1] if tiny else section.parts
        running = [_start(section, part, Path(name), device, tiny, began + seconds) for part in parts]
        try:
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, began + seconds + _PATIENCE - time.monotonic()))
                # It ends itself at its limit, unless it cannot.
                one.timed_out = time.monotonic() - began >= seconds
        finally:
            for one in running:
                # It and the ranks that it started, dead or alive.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
        _write_together(section, running, output / f"{section.name}.json", time.monotonic() - began, seconds)
    found: dict[str, Any] = json.loads((output / f"{section.name}.json").read_text())
    return found


def _start(section: Section, part: str, folder: Path, device: str, tiny: bool, end: float) -> _Process:
    file, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_check.section", section.name, "--module", section.path]
    command += ["--part", part, "--device", device, "--file", str(file), "--end", str(end)]
    command += ["--tiny"] if tiny else []
    with log.open("wb") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
    return _Process(part, file, log, process)


def _write_together(section: Section, running: list[_Process], file: Path, took: float, limit: float) -> None:
    """The parts' files as one. A section is as well off as the worst of its parts."""
    rows, left_out, errors, statuses = [], [], [], set()
    for one in running:
        found = (
            json.loads(one.file.read_text()) if one.file.exists() else {"status": "began", "rows": [], "left out": []}
        )
        rows += found["rows"]
        left_out += found["left out"]
        status, error = found["status"], found.get("error")
        if status == "began":
            status = "timed out" if one.timed_out else "failed"
            why = f"stopped after {limit:.0f} s" if one.timed_out else f"ended with {one.process.returncode}"
            error = f"{why}; the last that it printed:\n{one.log.read_text(errors='replace')[-_LAST_WORDS:]}"
        statuses.add(status)
        if error is not None:
            errors.append(f"{one.part}: {error}" if one.part else error)
    worst = next(status for status in ("failed", "timed out", "skipped", "done") if status in statuses)
    write_section(file, section.name, worst, took, rows, left_out, "\n".join(errors) or None)


def run_all(
    sections: tuple[Section, ...], output: Path, *, device: str, tiny: bool, seconds: float
) -> dict[str, dict[str, Any]]:
    """All of them in at most ``seconds``, telling of each as it ends; returns their JSON by name."""
    end = time.monotonic() + seconds
    found = {}
    for section in sections:
        rest = end - time.monotonic() - _PATIENCE
        limit = rest if section.takes_the_rest else min(section.seconds, rest)
        if limit < _LEAST:
            file = output / f"{section.name}.json"
            write_section(file, section.name, "skipped", 0.0, [], [], f"out of time: {seconds:.0f} s for all sections")
            found[section.name] = json.loads(file.read_text())
        else:
            found[section.name] = run_section(section, output, device=device, tiny=tiny, seconds=limit)
        print("\n".join(told(found[section.name])), flush=True)
    return found


def told(found: dict[str, Any]) -> list[str]:
    """A section in a few lines: what came of it, what is wrong, what was skipped and why."""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in found["verdicts"].items())
    lines = [f"{found['section']}: {found['status']}, {found['seconds']} s" + (f" ({verdicts})" if verdicts else "")]
    if found["error"] is not None:
        lines.append(f"  {found['status']}: {found['error'].strip().splitlines()[-1]}")
    lines += [f"  left out: {what}" for what in found["left out"]]
    wrong = [row for row in found["rows"] if row.get("verdict") == WRONG]
    lines += [f"  wrong: {json.dumps(row)}" for row in wrong[:3]]
    if len(wrong) > 3:
        lines.append(f"  and {len(wrong) - 3} more, in the file")
    return lines


def all_well(found: dict[str, dict[str, Any]]) -> bool:
    """Nothing failed, hung or is wrong; what was skipped is no failure."""
    return all(one["status"] in ("done", "skipped") and not one["verdicts"].get(WRONG) for one in found.values())
