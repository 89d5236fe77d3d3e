"""The report of ``para_core.doctor``: findings for a table, and measured figures for the planner."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OK, CHANGE, BROKEN = "ok", "change", "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is a line of the doctor's table.

    Args:
        verdict (`str`): ``"ok"``, ``"change"`` (it works but could be better) or ``"broken"``.
        advice (`str`): Advice on what to change; empty if there is none.
    """

    name: str
    found: str
    verdict: str = OK
    advice: str = ""


@dataclass
class DoctorReport:
    """The results of all checks, and the measured figures for ``plan_mesh(measured=...)``."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return any(finding.verdict == BROKEN for finding in self.findings)

    def table(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = [f"{finding.verdict:<7}{finding.name:<{width + 2}}{finding.found}" for finding in self.findings]
        advice = [f"- {finding.name}: {finding.advice}" for finding in self.findings if finding.advice]
        return "\n".join([*lines, "", "What to change:" if advice else "Nothing to change.", *advice])

    def write(self, path: Path) -> None:
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "doctor": self.figures,
            "findings": [asdict(finding) for finding in self.findings],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and the device and dtype that the checks use."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def gathered(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. This is a collective call."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values
