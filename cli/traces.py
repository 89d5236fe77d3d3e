"""The files of profiler traces of ``para_core bench``. Imports no torch. Tests: tests/cli/test_bench.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from para_core.cli.torchrun import in_torchrun
from para_core.fleet.result_files import require_file


def trace_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's profiler trace in ``folder``."""
    return folder / f"rank-{rank}.json.gz"


def require_new_traces(folder: Path, ranks: int) -> None:
    """Make the folder for the traces, and check that none of them exists.

    Raises:
        OSError: The folder cannot be written to, or already holds one of the traces.
    """
    local_ranks: Sequence[int] = range(ranks)
    if in_torchrun():
        local_ranks = [int(os.environ["RANK"])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--profile {folder}: {error.strerror}. Use another folder.") from error
    for path in (trace_path(folder, rank) for rank in local_ranks):
        require_file(path)
        if path.exists():
            raise FileExistsError(
                f"{path} exists, and is not overwritten. Use another folder with --profile."
            )
