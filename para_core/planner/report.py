"""What the doctor found: lines of a table, and figures that the planner takes."""

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
    """One line of the table.

    Args:
        verdict: ``"ok"``, ``"change"`` (it runs, and could do better), or ``"broken"``.
        advice: what to do; empty where all is well.
    """

    name: str
    found: str
    verdict: str = OK
    advice: str = ""


@dataclass
class DoctorReport:
    """What was found, and the figures for :func:`para_core.adapters.plan_mesh`."""

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
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "doctor": self.figures,
            "findings": [asdict(x) for x in self.findings],
        }
        path.write_text(json.dumps(found, indent=2) + "\n")


@dataclass(frozen=True)
class Ranks:
    """This process among those that were launched."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def gathered(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values
