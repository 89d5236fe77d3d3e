"""The inputs of a section, and the file of its rows."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment

# A row has one of these verdicts, unless it only reports a measurement. WRONG: a number is outside its bound. FAILED:
# there is no number, because the call raised, was refused, or waited although it must not. REFUSED: PyTorch refuses the
# same call.
OK, WRONG, FAILED, REFUSED = "ok", "wrong", "failed", "refused"
# The file is written after each of the first rows, and later every half second, because there may be hundreds.
_BETWEEN_WRITES = 0.5
_FEW = 100


class SectionSkipped(Exception):
    """The error if something that a section needs is missing. The message names it."""


@dataclass
class SectionJob:
    """A run of a section, or of one part of it.

    Args:
        tiny: whether to use sizes at which the section takes a moment on a CPU.
        file: the file that is rewritten as rows arrive, so that a process that dies leaves its rows.
        end: the time after which nothing new should begin, in ``time.monotonic()``, which processes share.
        part: the part of a section whose parts run at the same time, else "".
        compile_backend: the backend that sections pass to ``torch.compile``.

    Attributes:
        out_of_time: what was left out for lack of time, and another run may add.
        asked: the seconds that :meth:`has_time` was called with, by name.
    """

    section: str
    device: torch.device
    tiny: bool
    file: Path
    end: float
    part: str = ""
    compile_backend: str = "inductor"
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    out_of_time: list[str] = field(default_factory=list)
    asked: dict[str, float] = field(default_factory=dict)
    _start: float = field(default_factory=time.monotonic)
    _written: float = 0.0

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def has_time(self, what: str, seconds: float) -> bool:
        """Return whether ``seconds`` remain for ``what``, and record it as left out if not. Tiny sizes need no time."""
        self.asked[what] = seconds
        if self.seconds_left >= (0 if self.tiny else seconds):
            return True
        self.run_out(f"{what}: {max(0.0, self.seconds_left):.0f} s left, it may need {seconds:.0f}")
        return False

    def run_out(self, what: str) -> None:
        """Record that ``what`` was left out for lack of time."""
        self.out_of_time.append(what)
        self.write("began")

    def add(self, **row: Any) -> None:
        """Keep a row. It is in the file within a moment."""
        self.rows.append(row)
        if len(self.rows) < _FEW or time.monotonic() - self._written > _BETWEEN_WRITES:
            self.write("began")

    def replace_rows(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.write("began")

    def measure(self, call: Callable[..., dict[str, Any] | None], /, *args: Any, **row: Any) -> None:
        """Add ``row`` with the result of ``call(*args)``, or as failed if the call raises an error that is not
        fatal.
        """
        try:
            row |= {"verdict": OK, **(call(*args) or {})}
        except Exception as error:  # Triton's own errors are no RuntimeErrors.
            if is_fatal(error):
                raise
            row |= {"verdict": FAILED, "raised": first_line(error)}
        self.add(**row)

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append(f"{what}: {why}")
        self.write("began")

    def write(self, status: str, error: str | None = None) -> None:
        """Write the file. ``status`` is began, done, skipped or failed."""
        seconds = time.monotonic() - self._start
        write_section(
            self.file, self.section, status, seconds, self.rows, self.left_out, error, out_of_time=self.out_of_time
        )
        self._written = time.monotonic()


def write_section(
    file: Path,
    section: str,
    status: str,
    seconds: float,
    rows: list[dict[str, Any]],
    left_out: list[str],
    error: str | None,
    *,
    out_of_time: list[str],
    options: dict[str, Any] | None = None,
) -> None:
    """Write the JSON of a section, one row per line. ``file`` is replaced in one step, so it is never half-written."""
    head = {
        "environment": section_environment(),
        "section": section,
        "options": options,
        "status": status,
        "seconds": round(seconds, 1),
        "verdicts": dict(Counter(row["verdict"] for row in rows if "verdict" in row)),
        "left out": left_out,
        "out of time": out_of_time,
        "error": error,
    }
    lines = ",".join(f"\n    {json.dumps(row)}" for row in rows)
    end = "\n  " if rows else ""
    text = json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "rows": [{lines}{end}]\n}}\n'
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


@functools.cache
def section_environment() -> dict[str, Any]:
    """Return the date, the device and the versions for the JSON of a section."""
    versions: dict[str, Any] = {}
    for name in ("torch", "triton", "transformers", "diffusers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.version.cuda is not None:
        versions |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    return {**environment(), "versions": versions}


def first_line(error: BaseException, at_most: int = 300) -> str:
    """Return the type and the first line of an exception."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:at_most]


def is_fatal(error: BaseException) -> bool:
    """Return whether the error is one of the device, after which no result of this process can be trusted."""
    return "CUDA error" in str(error)
