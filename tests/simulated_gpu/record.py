"""The record of the simulated device: counts by line, faults, and the log of collectives."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2]) + "/"


class DeviceFault(RuntimeError):
    """Something that a GPU or NCCL refuses, or would compute wrongly in silence."""


@dataclass(frozen=True)
class Launch:
    """A collective that was launched. ``number`` counts the launches of this process."""

    number: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str
    # For all_to_all the elements per rank, sent and received; for send and recv the peer's index in ``ranks``.
    sizes: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    peer: int | None = None
    line: str = ""


@dataclass(frozen=True)
class Waited:
    """The compute stream waits for a collective from here on."""

    number: int


@dataclass(frozen=True)
class HostWaits:
    """The host waits here until the device has nothing left to do."""


Event = Launch | Waited | HostWaits


@dataclass
class Record:
    """Everything that is counted. Launches are operators that are no views, and Triton kernels."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: Counter[str] = field(default_factory=Counter)
    log: list[Event] = field(default_factory=list)
    # Where a process that may be killed at any time keeps its log.
    log_file: BinaryIO | None = None
    raises: bool = True
    # The number of the job, of which a process may run several.
    job: int = 0

    def add(self, event: Event) -> None:
        self.log.append(event)
        if self.log_file is not None:
            self.log_file.write(pickle.dumps(event))

    def count(self, kind: str, detail: str = "") -> None:
        self.counts[kind] += 1
        if kind != "launches":  # Naming the line of each launch would take as long as all else.
            self.lines[kind][f"{line()} {detail}".strip()] += 1

    def start_again(self) -> None:
        """Forget everything, for the next job of this process."""
        self.counts.clear(), self.lines.clear(), self.faults.clear(), self.log.clear()
        self.raises = True
        self.job += 1

    def fault(self, text: str, *, at: str = "") -> None:
        """Keep a fault, and raise it unless ``at`` names a line that ran before."""
        text = f"{text} @ {at or line()}"
        self.faults[text] += 1
        if self.raises and not at:
            raise DeviceFault(text)


record = Record()


@contextmanager
def measured() -> Iterator[Record]:
    """Yield the counts of the block, which are empty until it ends."""
    counts, lines, result = record.counts.copy(), copy.deepcopy(record.lines), Record()
    yield result
    result.counts = record.counts - counts
    for kind, by_line in record.lines.items():
        result.lines[kind] = by_line - lines[kind]


def line() -> str:
    """Return the innermost line on the stack that is neither torch's nor the simulation's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(HERE) and "/torch/" not in file and not file.endswith("contextlib.py"):
            return f"{_short(file)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def _short(file: str) -> str:
    if file.startswith(ROOT) and "site-packages" not in file:
        return file.removeprefix(ROOT)
    return file.rpartition("site-packages/")[2]
