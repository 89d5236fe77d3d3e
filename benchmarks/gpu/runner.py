"""Run the sections one after the other, each in its own processes with its own time limit.

``python -m benchmarks.gpu.runner NAME ...`` is one such process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import FAILED, WRONG, SectionJob, SectionSkipped, section_environment, write_section

# This many characters of a process's last output are kept in the JSON of a section that did not end well.
_LAST_WORDS = 4000
# After its limit a process has this time to print its stacks.
_PATIENCE = 2.0  # seconds
# Tiny sizes run where there is no GPU, on a machine that may be busy, and their times say nothing.
_PATIENCE_IF_TINY = 4
# The rows of running processes are copied into the section's file in this interval.
_BETWEEN_COPIES = 0.3  # seconds
# A section's limit has these parts in addition to the NEEDS of its module: the start (Python, the import of torch,
# which takes 10 s from a cold disk, and a CUDA context), and the end, in which no new step begins.
START, END = 20.0, 3.0  # seconds


@dataclass(frozen=True)
class Section:
    """A module with a function ``run(job)`` and with ``NEEDS``, the seconds that each of its steps asks for.

    Args:
        seconds: the limit of the section, at least ``START + sum(NEEDS.values()) + END``.
        first: the seconds with which the section starts, at least ``START`` + the first of ``NEEDS`` + ``END``. The
            steps that no longer fit are left out.
        round: 1 answers the first questions about a GPU, 2 measures FLUX.1 and attention, 3 is all else.
        parts: parts that run at the same time, in one process each (tiny: the first and the last). Sections that
            measure time have one part.
        module: the module. Defaults to ``benchmarks.gpu.<name>``.
    """

    name: str
    seconds: float
    first: float
    round: int
    parts: tuple[str, ...] = ("",)
    module: str = ""

    @property
    def path(self) -> str:
        return self.module or f"benchmarks.gpu.{self.name}"


# These are the keys of two_ranks.PARTS. This process imports no section, so that one that cannot be imported stops no
# other.
_PIPELINES = (
    "exact",
    "bound device",
    "pipefusion",
    "stages, failed call",
    "PipeFusion, failed callback",
    "PipeFusion, failed call",
)
# This is the order in which they run.
SECTIONS = (
    Section("blocks", 95, 55, round=1),
    Section("kernels", 130, 85, round=1),
    Section("vae", 60, 58, round=1),
    Section("speed", 125, 50, round=1),
    Section("host", 75, 40, round=1),
    Section("flux", 140, 60, round=2),
    Section("attention", 85, 65, round=2),
    Section(
        "local",
        125,
        125,
        round=3,
        parts=("flash", "efficient", "math", "cudnn"),
        module="benchmarks.gpu.local_attention",
    ),
    Section("two_ranks", 145, 140, round=3, parts=_PIPELINES),
    Section("ranks", 75, 75, round=3),
    Section("nccl", 95, 65, round=3),
    Section("nccl_ranks", 175, 55, round=3),
    Section("flux_graphs", 265, 60, round=3),
)
# All sections together take at most this long.
ALL = sum(section.seconds + _PATIENCE for section in SECTIONS)


@dataclass(frozen=True)
class Options:
    """The options of a run that its results depend on."""

    device: str = "cuda"
    tiny: bool = False
    compile_backend: str = "inductor"


@dataclass
class _RunningPart:
    part: str
    file: Path
    log: Path
    process: subprocess.Popen[bytes]


def run_section(section: Section, output: Path, options: Options, *, seconds: float) -> dict[str, Any]:
    """Run ``section`` for at most ``seconds``, write its JSON row by row, and return the content."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        parts = section.parts[:: len(section.parts) - 1 or 1] if options.tiny else section.parts
        running = [_start(section, part, Path(name), options, began + seconds) for part in parts]
        try:
            # A part ends itself at its limit, if it can.
            while any(part.process.poll() is None for part in running) and seconds_since(began) < seconds + _PATIENCE:
                time.sleep(_BETWEEN_COPIES)
                _write_together(section, running, output, options, seconds_since(began))
        finally:
            for running_part in running:
                # Kill the process and the ranks that it started, dead or alive.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running_part.process.pid, signal.SIGKILL)
                running_part.process.wait()
        _write_together(section, running, output, options, seconds_since(began), limit=seconds)
    return _read(output, section)


def seconds_since(began: float) -> float:
    return time.monotonic() - began


def _read(output: Path, section: Section) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / f"{section.name}.json").read_text())
    return content


def _start(section: Section, part: str, folder: Path, options: Options, end: float) -> _RunningPart:
    file, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.runner", section.name, "--module", section.path]
    command += ["--part", part, "--file", str(file), "--end", str(end), "--device", options.device]
    command += ["--compile-backend", options.compile_backend, *["--tiny"] * options.tiny]
    with log.open("wb") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
    return _RunningPart(part, file, log, process)


_EMPTY: dict[str, Any] = {"status": "began", "rows": [], "left out": [], "out of time": []}


def _write_together(
    section: Section,
    running: list[_RunningPart],
    output: Path,
    options: Options,
    took: float,
    limit: float | None = None,
) -> None:
    """Write the JSON of all parts as one. The section's status is the worst of its parts.

    Args:
        limit: the limit of the section in seconds, after it has ended. Until then its status is "began".
    """
    rows, left_out, out_of_time, errors, statuses = [], [], [], [], set()
    for part in running:
        content = json.loads(part.file.read_text()) if part.file.exists() else _EMPTY
        rows += content["rows"]
        left_out += content["left out"]
        out_of_time += content["out of time"]
        status, error = content["status"], content.get("error")
        if status == "began" and limit is not None:
            status = "killed" if took >= limit else "failed"
            why = f"killed after {limit:.0f} s" if took >= limit else f"ended with {part.process.returncode}"
            error = f"{why}; the end of its output:\n{part.log.read_text(errors='replace')[-_LAST_WORDS:]}"
        statuses.add(status if limit is not None else "began")
        if error is not None:
            errors.append(f"{part.part}: {error}" if part.part else error)
    worst = next(status for status in ("began", "failed", "killed", "skipped", "done") if status in statuses)
    error = "\n".join(errors) or None
    file, of_run = output / f"{section.name}.json", asdict(options)
    write_section(file, section.name, worst, took, rows, left_out, error, out_of_time=out_of_time, options=of_run)


def run_all(
    sections: tuple[Section, ...], output: Path, options: Options, *, seconds: float, resume: bool = False
) -> dict[str, dict[str, Any]]:
    """Run ``sections`` in at most ``seconds``, print a summary of each as it ends, and return their JSON by name.

    A section starts if its first step fits into the time that is left. If it does not, it is skipped, and a later one
    may still run.

    Args:
        resume: whether to keep the results of finished sections in ``output``. Those that failed before come last.
    """
    end = time.monotonic() + seconds
    before = {section.name: earlier_results(section, output, options) for section in sections} if resume else {}
    results = {}
    for section in sorted(sections, key=lambda section: _has_failed(before.get(section.name))):
        earlier = before.get(section.name)
        rest = end - time.monotonic() - _PATIENCE
        if earlier is not None and _is_finished(earlier):
            results[section.name] = earlier
            print(f"{section.name}: {earlier['status']} before, kept", flush=True)
            continue
        if rest >= section.first:
            limit = min(section.seconds * (_PATIENCE_IF_TINY if options.tiny else 1), rest)
            results[section.name] = run_section(section, output, options, seconds=limit)
        elif earlier is not None and earlier["rows"]:
            results[section.name] = earlier
            print(f"{section.name}: out of time, kept what there is", flush=True)
            continue
        else:
            results[section.name] = _skip(section, output, options, max(0.0, rest))
        print("\n".join(summary(results[section.name])), flush=True)
    return results


def _skip(section: Section, output: Path, options: Options, rest: float) -> dict[str, Any]:
    file, of_run = output / f"{section.name}.json", asdict(options)
    why = f"out of time: {rest:.0f} s left, it starts with {section.first:.0f}; --resume runs it"
    write_section(file, section.name, "skipped", 0.0, [], [], why, out_of_time=["all of it"], options=of_run)
    return _read(output, section)


def earlier_results(section: Section, output: Path, options: Options) -> dict[str, Any] | None:
    """Return what ``output`` has of ``section``, if it is of this device, these versions and these options."""
    try:
        content = _read(output, section)
    except (OSError, ValueError):
        return None
    now, then = section_environment(), content["environment"]
    same = all(now[name] == then.get(name) for name in ("device", "versions"))
    return content if same and content.get("options") == asdict(options) else None


def _is_finished(content: dict[str, Any]) -> bool:
    return content["status"] in ("done", "skipped") and not content["out of time"]


def _has_failed(content: dict[str, Any] | None) -> bool:
    return content is not None and content["status"] in ("failed", "killed")


# The numbers of a row that are printed. Ratios of times begin with "of ".
_PRINTED = ("ms", "ms per step", "host ms", "host ms per step", "TFLOP/s", "steps skipped", "peak GB", "GPU idle")
_PRINTED += ("launches", "simulated launches", "waits", "simulated waits")


def summary(content: dict[str, Any]) -> list[str]:
    """Return the lines to print for a section: its status, measurements, wrong results, and what was left out."""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in content["verdicts"].items())
    lines = [
        f"{content['section']}: {content['status']}, {content['seconds']} s" + (f" ({verdicts})" if verdicts else "")
    ]
    if content["error"] is not None:
        lines.append(f"  {content['status']}: {content['error'].strip().splitlines()[-1]}")
    for row in content["rows"]:
        numbers = [f"{name} {row[name]}" for name in row if name in _PRINTED or name.startswith("of ")]
        if numbers and (name := row.get("way", row.get("call"))):
            lines.append(f"  {name}: {', '.join(numbers)}")
    lines += [f"  left out: {what}" for what in content["left out"]]
    lines += [f"  out of time: {what}" for what in content["out of time"] if content["status"] != "skipped"]
    for verdict in (WRONG, FAILED):
        rows = [row for row in content["rows"] if row.get("verdict") == verdict]
        lines += [f"  {verdict}: {json.dumps(row)}" for row in rows[:3]]
        if len(rows) > 3:
            lines.append(f"  and {len(rows) - 3} more {verdict}, in the file")
    return lines


def exit_code(results: dict[str, dict[str, Any]]) -> int:
    """Return 1 if a number is wrong, else 3 if a section or a row failed, else 0. A skipped section is no failure."""
    if any(content["verdicts"].get(WRONG) for content in results.values()):
        return 1
    ended = all(content["status"] in ("done", "skipped") for content in results.values())
    return 0 if ended and not any(content["verdicts"].get(FAILED) for content in results.values()) else 3


def run_here() -> None:
    """Run one section, or one part of it, in this process. The outcome is in the file."""
    import torch

    from benchmarks.gpu.processes import use_no_network

    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--module", required=True)
    parser.add_argument("--part", default="")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--end", type=float, required=True, help="time.monotonic() at which this process ends itself")
    args = parser.parse_args()
    # Print the stacks of a process that hangs. The runner stores the end of the output.
    faulthandler.dump_traceback_later(max(0.1, args.end - time.monotonic()), exit=True)
    use_no_network()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(device.type, device.index or 0)
        torch.cuda.set_device(device)
    # Steps that have begun should end and be written before the limit.
    job = SectionJob(args.name, device, args.tiny, args.file, args.end - END, args.part, args.compile_backend)
    job.write("began")
    try:
        importlib.import_module(args.module).run(job)
    except SectionSkipped as reason:
        job.write("skipped", str(reason))
    except BaseException:
        job.write("failed", traceback.format_exc())
        raise
    else:
        job.write("done")


if __name__ == "__main__":
    run_here()
