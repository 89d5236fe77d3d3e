"""One module on several hosts, each with a torchrun of its own that meets the others by c10d, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.faults.hosts import Hosts, end_all

_ROOT = Path(__file__).parents[2]
_PORT = 29400


class Failed(RuntimeError):
    """A torchrun did not end well, or in time; the message has the end of what each printed."""


def torchrun(
    hosts: Hosts,
    module: str,
    *arguments: str,
    ranks_per_host: int = 2,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    seconds: float = 300.0,
) -> list[str]:
    """``python -m module arguments`` on every rank; returns what each host printed.

    Args:
        options: more of torchrun's, as ``--max-restarts=1``.
        seconds: after which all are killed.

    Raises:
        Failed: a host's torchrun ended with an error, or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"host{host}" for host in range(hosts.num_hosts)]
        started: list[subprocess.Popen[str]] = []
        try:
            for host, output in enumerate(outputs):
                command = [module, *arguments]
                started.append(_start(hosts, host, output, command, ranks_per_host, options, environment or {}))
            late = _wait(started, seconds)
        finally:
            end_all(started)
        printed = [output.read_text(errors="replace") for output in outputs]
    codes = [process.returncode for process in started]
    if late or any(codes):
        why = f"not all of them ended within {seconds:g} s" if late else f"they ended with {codes}"
        raise Failed("\n".join([f"torchrun on {hosts.num_hosts} hosts: {why}.", *[text[-4000:] for text in printed]]))
    return printed


def _start(
    hosts: Hosts,
    host: int,
    output: Path,
    program: Sequence[str],
    ranks_per_host: int,
    options: Sequence[str],
    environment: Mapping[str, str],
) -> subprocess.Popen[str]:
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:{_PORT}", f"--rdzv-id={hosts.name}"]
    # Nothing resolves names here: without these, no host knows itself in the end point, and tells the others a name.
    local = [f"--local-addr={hosts.address(host)}", f"--rdzv-conf=is_host={'true' if host == 0 else 'false'}"]
    size = [f"--nnodes={hosts.num_hosts}", f"--nproc-per-node={ranks_per_host}"]
    command = [sys.executable, "-m", "torch.distributed.run", *size, *rendezvous, *local, *options, "-m", *program]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **environment}
    with output.open("w") as file:
        return hosts.start(host, command, environment=variables, stdout=file, stderr=subprocess.STDOUT, cwd=_ROOT)


def _wait(started: Sequence[subprocess.Popen[str]], seconds: float) -> bool:
    """Whether some are still running after so long."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False
