"""Run a script as a user does: on the ranks of the pool, which have imported torch and diffusers, or as a program."""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def as_program(*command: str | Path, cwd: Path) -> str:
    """Run a script with its arguments in a process of its own, which must end well, and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(script, arguments, environment):
    """Run ``script`` on this rank, or on rank 0 alone if ``environment`` is None. Return its output."""
    rank = dist.get_rank()
    # The script creates its own group. Wait until all ranks have created this one, because a rank that leaves closes
    # the connections that others are still opening.
    dist.barrier()
    dist.destroy_process_group()
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))
        if environment is None:
            if rank > 0:
                return ""
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(script.parent), *sys.path]))
        stack.enter_context(contextlib.chdir(script.parent))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(printed))
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """Yield the environment variables by which torchrun tells ranks the address of the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def run_command(arguments, environment):
    """Run a command line on this rank, as under torchrun. Return its exit code."""
    # typer and rich are slow to import, and few scripts need them.
    from para_core.cli.app import run
    from para_core.fleet.libraries import LIBRARIES

    dist.barrier()  # Wait for the other ranks, as in run_script.
    dist.destroy_process_group()
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in LIBRARIES}
    try:
        with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(arguments)
    finally:
        # The command quiets libraries for its whole process, which outlives the command here.
        for logger, level in loggers.items():
            logger.setLevel(level)


def command_on_ranks(rank_pool, *arguments, ranks=2):
    """Run a command line of para_core on the ranks of the pool, which must end without an error."""
    with meeting_point() as rendezvous:
        assert rank_pool.run(run_command, ranks, arguments, rendezvous, timeout=300) == [0] * ranks


def on_ranks(rank_pool, script, *arguments, ranks=2):
    """Run ``script`` on the ranks of the pool, and return the output of rank 0."""
    with meeting_point() as rendezvous:
        return rank_pool.run(run_script, ranks, script, arguments, rendezvous, timeout=300)[0]


def alone(rank_pool, script, *arguments):
    return rank_pool.run(run_script, 2, script, arguments, None, timeout=300)[0]
