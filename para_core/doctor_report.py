"""The ranks that the doctor examines, and the report of its checks.

The checks themselves are in :mod:`.doctor`. Tests: tests/test_doctor.py.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from para_core.devices import Device, gpu_at_hand

OK, CHANGE, BROKEN = "ok", "change", "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is a line of the doctor's table.

    Args:
        verdict (`str`): ``"ok"``, ``"change"`` (it works but could be better) or ``"broken"``.
        advice (`str`): Advice on what to change; empty if there is none.
    """

    name: str
    result: str
    verdict: str = OK
    advice: str = ""


@dataclass
class DoctorReport:
    """The results of all checks, and the measured figures."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, result: str, advice: str = "", *, broken: bool = False) -> None:
        """Add a finding: broken, or to be changed if there is ``advice``, or ok."""
        verdict = OK
        if advice:
            verdict = CHANGE
        if broken:
            verdict = BROKEN
        self.findings.append(Finding(name, result, verdict, advice))

    @property
    def broken(self) -> bool:
        """Whether a check is broken."""
        return any(finding.verdict == BROKEN for finding in self.findings)

    def table(self) -> str:
        """Return the findings as the lines of a table, followed by all advice."""
        width = max(len(finding.name) for finding in self.findings)
        lines = [
            f"{finding.verdict:<7}{finding.name:<{width + 2}}{finding.result}" for finding in self.findings
        ]
        advice = [f"- {finding.name}: {finding.advice}" for finding in self.findings if finding.advice]
        if not advice:
            return "\n".join([*lines, "", "Nothing to change."])
        return "\n".join([*lines, "", "What to change:", *advice])

    def write(self, path: Path) -> None:
        """Write the findings and figures as JSON to ``path``."""
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "doctor": self.figures,
            "findings": [asdict(finding) for finding in self.findings],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


class FailedElsewhereError(RuntimeError):
    """The error of a check that has failed on another rank, which its message names."""


@dataclass(frozen=True)
class _Failure:
    """The error of a failed check, which a rank sends in place of its value."""

    message: str


@dataclass(frozen=True)
class ExaminedRanks:
    """The rank of this process, the number of ranks, and the device and dtype that the checks use.

    Each check calls :meth:`gather` after what a rank does alone. If that fails, the rank calls
    :meth:`share_failure` instead, so that the ranks are in the same check again. After its last
    :meth:`gather` a check must raise on all ranks or on none: a rank that raised alone would call
    :meth:`share_failure` while the others are in the next check.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. Collective.

        Raises:
            FailedElsewhereError: Another rank calls :meth:`share_failure`.
        """
        values = self._exchange(value)
        for other in values:
            if isinstance(other, _Failure):
                raise FailedElsewhereError(other.message)
        return values

    def share_failure(self, error: Exception) -> None:
        """Let the ranks that call :meth:`gather` fail, too, because of ``error`` on this rank. Collective."""
        self._exchange(_Failure(f"rank {self.rank}: {type(error).__name__}: {error}"))

    def _exchange(self, value: Any) -> list[Any]:
        """Return what each rank passes, in rank order. Collective."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def known_device(self) -> Device | None:
        """Return the data sheet's figures for this rank's GPU; None on a CPU, or for a GPU that the table lacks."""
        try:
            if self.device.type == "cuda":
                return gpu_at_hand(self.device)
            return None
        except ValueError:
            return None
