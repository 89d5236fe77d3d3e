"""Where and when a figure was measured: goes into every JSON under benchmarks/results/."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Device, versions and date."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
    }


def write_results(name: str, results: dict[str, Any], *packages: str) -> Path:
    """Write ``results`` with its environment to ``benchmarks/results/<name>.json``."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": environment(*packages), **results}, indent=2) + "\n")
    return path
