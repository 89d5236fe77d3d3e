"""Ranks as the commands see them: their number, and under torchrun the process group and the first rank's
part.

`generation.py`, `measurement.py` and `serve.py` call it, and `comparison.py` on the ranks themselves. It
imports torch; what is asked before that stands in `torchrun.py`, and the ranks are started in
`fleet/engine.py`. Tests: tests/cli/test_refusals.py, tests/cli/test_generate.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer

from para_core.cli.torchrun import in_torchrun, is_first_of_torchrun, read_stated_ranks
from para_core.fleet.failures import describe_exception
from para_core.fleet.recipe import Recipe

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this process is rank 0, in the process group if there is one, or no rank at all."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return is_first_of_torchrun()


def count_ranks(requested: int | None, replicas: int) -> int:
    """Return the number of ranks of each replica: ``requested``, else torchrun's ranks, else GPUs //
    ``replicas``, but at least 1.

    Raises:
        typer.BadParameter: A number is below 1 or contradicts torchrun's ranks, or a single replica has more
            ranks than this machine has GPUs (without GPUs, any number is accepted).
    """
    stated = read_stated_ranks(requested, replicas)
    if stated is not None and in_torchrun():
        return stated
    gpus = torch.cuda.device_count()
    ranks = stated or max(1, gpus // replicas)
    if gpus and replicas == 1 and ranks > gpus:
        raise typer.BadParameter(
            f"--ranks {ranks}, and this machine has {gpus} GPUs: expected at most one rank per GPU."
        )
    return ranks


@contextmanager
def ending_on_error(*, debug: bool) -> Iterator[None]:
    """If an exception is raised inside this context on a rank of torchrun, print its message, and end the
    process.

    A process that no launcher started does not end: the exception is raised.

    >>> from unittest import mock
    >>> ranks = mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"})
    >>> with ranks, mock.patch("os._exit") as end, mock.patch("sys.stderr") as stderr:
    ...     with ending_on_error(debug=False):
    ...         raise ValueError("no room")
    >>> end.call_args.args, stderr.write.call_args.args[0].strip()
    ((1,), 'error: rank 1: no room')
    """
    try:
        yield
    except Exception as error:
        if not in_torchrun():
            raise
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: rank {os.environ['RANK']}: {describe_exception(error)}\n")
        # Exit at once, without cleanup: torchrun then stops the other ranks, which may wait in a collective.
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def process_group(recipe: Recipe, *, late: float = 0.0) -> Iterator[None]:
    """Initialize the default process group inside this context, and select this rank's GPU. Only under
    torchrun.

    Ranks wait for each other ``late`` seconds longer than the recipe's timeout.
    """
    if not in_torchrun():
        yield
        return
    dist.init_process_group(timeout=timedelta(seconds=recipe.timeout + late))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    yield
    # Not after an exception: then destroying could wait for ranks, and ending_on_error ends the process.
    dist.destroy_process_group()


def from_first_rank(value: T) -> T:
    """Return the first rank's value on all ranks. A collective call if there is a process group."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather_values(value: Any) -> list[Any]:
    """Return the values of all ranks on all ranks. A collective call if there is a process group."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
