"""Run a Python program on simulated GPUs:  python -m tests.simulated_gpu [-m MODULE | PROGRAM] [ARGUMENTS]

Every process that the program starts has the device too (torchrun's ranks, servers, subprocesses). At the end the
counts of each process are printed, its faults, and what is wrong with the order of collectives. The exit code is the
program's, or 1 if there was a fault.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.simulated_gpu.order import problems
from tests.simulated_gpu.record import Event

ROOT = Path(__file__).parents[2]


def run(arguments: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run ``python *arguments`` on simulated GPUs. Each process leaves its record in ``folder`` when it ends."""
    path = [str(Path(__file__).with_name("site")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "SIMULATED_GPU": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **options.pop("env", {}),
    }
    return subprocess.run([sys.executable, *arguments], env=environment, check=False, **options)


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the processes that used the device: rank, world, counts, lines, faults and log."""
    found = []
    for file in sorted(folder.glob("*.record")):
        log = file.with_suffix(".log")
        found.append({**pickle.loads(file.read_bytes()), "log": list(_events(log))})
    return found


def _events(log: Path) -> Iterator[Event]:
    with log.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except EOFError:
                return


def faults(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the faults of all processes, and those of the order of the collectives of each world."""
    worlds: dict[str, dict[int, Any]] = defaultdict(dict)
    for report in found:
        yield from (f"rank {report['rank']}: {text} ({count} times)" for text, count in report["faults"].items())
        worlds[report["world"]][report["rank"]] = report
    for world in worlds.values():
        if sorted(world) == list(range(world[min(world)]["size"])):
            yield from problems([world[rank]["log"] for rank in sorted(world)])


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as name:
        code = run(arguments, Path(name)).returncode
        found = reports(Path(name))
    for report in found:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report["counts"].items()))
        print(f"simulated GPU, rank {report['rank']}: {counts}", file=sys.stderr)
    wrong = list(faults(found))
    print("\n".join(wrong or ["no faults"]), file=sys.stderr)
    return code or int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
