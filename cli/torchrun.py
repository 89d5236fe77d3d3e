"""Whether torchrun started this process, and the stated number of ranks. Tests: tests/cli/test_refusals.py."""

from __future__ import annotations

import os

import typer


def in_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_of_torchrun() -> bool:
    """Whether this process is rank 0 of torchrun, or no rank of it.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, {"RANK": "1"}, clear=True):
    ...     is_first_of_torchrun()  # A cluster that sets RANK, and no WORLD_SIZE, starts no ranks.
    True
    """
    return not in_torchrun() or os.environ["RANK"] == "0"


def read_stated_ranks(requested: int | None, replicas: int) -> int | None:
    """Return the number of ranks of each replica: torchrun's, else ``requested``; None if it depends on the
    GPUs.

    Raises:
        typer.BadParameter: A number is below 1, or contradicts torchrun's ranks.
    """
    if replicas < 1 or (requested is not None and requested < 1):
        numbers = f"--replicas {replicas}"
        if requested is not None:
            numbers = f"--ranks {requested} and {numbers}"
        raise typer.BadParameter(f"{numbers}: expected at least 1 of each.")
    if not in_torchrun():
        return requested
    world = int(os.environ["WORLD_SIZE"])
    if requested not in (None, world) or replicas > 1:
        raise typer.BadParameter(f"torchrun started {world} ranks: omit --ranks and --replicas.")
    return world
