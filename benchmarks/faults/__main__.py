"""Faults in a parallel generation on two hosts of two ranks, one fault per cell:  python -m benchmarks.faults

    --cells TEXT …   only those whose name contains one of these
    --again          those that are in the JSON already, too

Ranks are plain processes without a launcher, which would end the others itself, so that the library has to end them.
They are forked from this process, which has imported everything. Hosts are network namespaces. Without them (Linux,
root) they are loopback addresses, and faults of links are left out. Each cell is written to
benchmarks/results/faults.json when it is done (docs/measured/faults.md).

A cell is bad if a living rank does not end, if a call gives another image than one process, if no rank names the cause
and not all have their image, or if something remains after the end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import para_core.adapters.api  # noqa: F401  before the first fork
from benchmarks.faults.cells import (
    FAULTY_HOST,
    FAULTY_RANK,
    NUM_HOSTS,
    PIPELINES,
    RANKS_PER_HOST,
    SLOW_LINK,
    Cell,
    all_cells,
    build,
    call_of,
    verdict,
)
from benchmarks.faults.hosts import Hosts, open_hosts
from benchmarks.faults.rank import SLEEP, TIMEOUT, run_rank
from benchmarks.harness import parser_of, read_results, write_results
from para_core import version

# These are seconds from the start of a cell. On a slow link, each exchange of a VAE takes seconds, and none takes the
# whole time-out.
_LONGEST, _LONGEST_ON_SLOW_LINK = 120.0, 900.0
_RANKS = NUM_HOSTS * RANKS_PER_HOST
_fork = multiprocessing.get_context("fork")


def run_cell(cell: Cell, hosts: Hosts, expected: Any) -> dict[str, Any]:
    """Run ``cell``, and return the report of each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), Path(name) / "work"
        work.mkdir()
        agent, store = _start_agent(hosts)
        ranks = [
            _fork.Process(target=_in_rank, args=(cell, rank, hosts, folder, store, expected)) for rank in range(_RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            ended = _watch(cell, ranks, hosts, folder)
        finally:
            left = _end(ranks, cell)
            agent.kill()
            agent.join()
            if cell.of_link:
                hosts.heal(FAULTY_HOST)
        # torch names its files in shared memory after the process.
        shared = {name for name in _files(Path("/dev/shm")) if any(f"_{process.pid}_" in name for process in ranks)}
        return {
            **asdict(cell),
            **_reported(folder, ended),
            "left": {
                "processes": left,
                "sockets": sum(_sockets(hosts, host) for host in range(NUM_HOSTS)),
                "files": sorted(_files(work) | shared),
            },
        }


def _start_agent(hosts: Hosts) -> tuple[Any, tuple[str, int]]:
    """Start the process that holds the store on the first host. Return it and the address of the store."""
    ours, theirs = _fork.Pipe()
    agent = _fork.Process(target=_hold_store, args=(hosts, theirs), daemon=True)
    agent.start()
    return agent, (hosts.address(0), ours.recv())


def _hold_store(hosts: Hosts, connection: Any) -> None:
    hosts.enter(0)
    store = dist.TCPStore(hosts.address(0), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    connection.send(store.port)
    signal.pause()


def _in_rank(cell: Cell, rank: int, hosts: Hosts, folder: Path, store: tuple[str, int], expected: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    with (folder / f"rank{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder / "work")
    os.environ["TMPDIR"] = str(folder / "work")
    hosts.enter(rank // RANKS_PER_HOST)
    run_rank(cell, rank, folder, store, expected)


def _watch(cell: Cell, ranks: list[Any], hosts: Hosts, folder: Path) -> dict[int, float]:
    """Return when each rank ended. Disturb the link when the faulty rank asks for it."""
    deadline = time.monotonic() + (_LONGEST_ON_SLOW_LINK if cell.fault == SLOW_LINK else _LONGEST)
    ended: dict[int, float] = {}
    while len(ended) < _RANKS and time.monotonic() < deadline:
        if cell.of_link and (folder / "strike").exists() and not (folder / "struck").exists():
            if cell.fault == "link cut":
                hosts.cut(FAULTY_HOST)
            else:
                hosts.disturb(FAULTY_HOST, **({"delay": 2.0} if cell.fault == SLOW_LINK else {"loss": 0.05}))
            (folder / "struck").touch()
        for rank, process in enumerate(ranks):
            if rank not in ended and not process.is_alive():
                ended[rank] = time.monotonic()
        if cell.fault == "stopped" and len(ended) == _RANKS - 1 and FAULTY_RANK not in ended:
            break
        time.sleep(0.02)
    return ended


def _end(ranks: list[Any], cell: Cell) -> list[int]:
    """Kill the remaining processes. Return their ranks, except for one that was stopped on purpose."""
    left = []
    for rank, process in enumerate(ranks):
        if process.is_alive():
            if not (cell.fault == "stopped" and rank == FAULTY_RANK):
                left.append(rank)
            process.kill()
        process.join()
    return left


def _reported(folder: Path, ended: dict[int, float]) -> dict[str, Any]:
    note = folder / "struck at"
    struck = float(note.read_text()) if note.exists() else None
    ranks = []
    for rank in range(_RANKS):
        path = folder / f"rank{rank}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        if struck is not None and rank in ended:
            report["seconds"] = round(ended[rank] - struck, 2)
        if not path.exists():
            output = folder / f"rank{rank}.txt"
            report["output"] = output.read_text(errors="replace")[-2000:] if output.exists() else ""
        ranks.append(report)
    return {"struck": struck is not None, "ranks": ranks}


def _sockets(hosts: Hosts, host: int) -> int:
    """Return the number of TCP sockets on ``host`` that a process still holds after all ranks have ended."""
    with contextlib.suppress(OSError):
        if not hosts.namespaces:
            return 0
        process = hosts.start(host, ["ss", "-Htanp"], stdout=-1)
        return sum("users:" in line for line in process.communicate()[0].splitlines())
    return 0


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.is_dir() else set()


def expected_image(pipeline: str) -> Any:
    with torch.no_grad():
        return build(pipeline)(**call_of(pipeline))[0]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", nargs="+", default=[""], help="only those whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="those that were done before, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {**read_results("faults"), "timeout": TIMEOUT, "sleep": SLEEP}
    cells = [cell for cell in all_cells() if any(text in cell.name for text in args.cells)]
    cells = [cell for cell in cells if args.again or cell.name not in results["cells"]]
    version.version_and_sources()  # Do this once for all ranks, because sources may be edited while this runs.
    expected = {name: expected_image(name) for name in PIPELINES}
    # The garbage collector of each forked rank would walk these objects, and so copy their pages.
    gc.freeze()
    with open_hosts(NUM_HOSTS) as hosts:
        results["hosts"] = "network namespaces" if hosts.namespaces else "loopback addresses"
        for number, cell in enumerate(cells):
            if cell.of_link and not hosts.namespaces:
                continue
            result = run_cell(cell, hosts, expected[cell.pipeline])
            if not result["struck"]:  # A forked rank may find torch's thread pool broken before the cell began.
                result = run_cell(cell, hosts, expected[cell.pipeline])
            result["verdict"] = verdict(result)
            results["cells"][cell.name] = result
            write_results("faults", results, "diffusers")
            print(f"{number + 1}/{len(cells)} {cell.name}: {result['verdict']}", flush=True)


if __name__ == "__main__":
    main()
