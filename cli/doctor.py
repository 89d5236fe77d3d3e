"""``para_core doctor``: check a machine. Tests: tests/cli/test_plan.py, tests/test_doctor.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from para_core.cli import options
from para_core.cli.options import flag, option
from para_core.fleet.result_files import require_file


def doctor(
    out: Annotated[Path | None, option("JSON file for what was measured.", "FILE")] = None,
    ring: Annotated[int | None, option("Largest ring mesh dim; other ranks go to ulysses.", "N")] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU and gloo.")] = False,
    config: options.OptionFiles = None,
    debug: options.DebugOption = False,
) -> None:
    """Check versions, exactness and speed of this machine in a minute; under torchrun, of all ranks."""
    from para_core.doctor import examine_machine

    require_file(out)
    broken = examine_machine(out, ring=ring, cpu=cpu)
    if broken:
        raise typer.Exit(broken)
