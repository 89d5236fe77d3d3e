"""One peer's cells, in a Python that has the peer:  python -m benchmarks.peers.cells REQUEST RESULT

Reads a request (JSON: peer, names of rows, stand_ins, timeout), writes the outcome of every cell. The peer is imported once;
each attempt then forks one process per rank, so that whatever one of them breaks is gone with it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.call import Call, Part
from benchmarks.peers.rows import ROWS, Row
from benchmarks.peers.verdicts import EXACT, HALF_PRECISION, best, verdict

# (ring, ulysses)
SHAPES = {"Ulysses": (1, 2), "ring": (2, 1), "2 × 2": (2, 2)}
# When one rank has raised, the others may be waiting for it for ever.
GRACE = 3


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; infinite where shapes differ or a number is NaN."""
    if found.shape != expected.shape:
        return float("inf")
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error.nan_to_num(nan=float("inf")))


NAMES = ("out", "gradient of query", "gradient of key", "gradient of value")


def judge(part: Part, expected: list[Tensor], bounds: list[float]) -> dict[str, Any]:
    """What a rank reports of its part: relative errors, and above which they are no rounding."""
    held = (part.positions, part.positions, part.key_positions, part.key_positions)
    compared = zip(NAMES, [part.out, *part.gradients], expected, held, bounds, strict=False)
    errors, allowed = {}, {}
    for name, mine, whole, positions, bound in compared:
        errors[name] = relative_error(mine, whole.index_select(2, positions))
        allowed[name] = bound
    return {"errors": errors, "bounds": allowed, "positions": part.positions.tolist()}


def reference(row: Row) -> tuple[list[Tensor], list[float]]:
    """What one device computes, and how far from it each part of it may be."""
    if row.dtype == torch.float32:
        expected = row.on_one_device()
        return expected, [EXACT] * len(expected)
    exact = row.on_one_device(torch.float64)
    own = [relative_error(rounded, whole) for rounded, whole in zip(row.on_one_device(), exact, strict=True)]
    return exact, [HALF_PRECISION * error for error in own]


def be_rank(
    peer: ModuleType, row: Row, shape: tuple[int, int], setting: dict[str, Any], rank: int, folder: str
) -> None:
    """One rank of one attempt; writes its report."""
    silence()
    parent = os.getppid()
    world = shape[0] * shape[1]
    try:
        # Where the kernel that a peer calls takes half precision only, it is asked for that.
        row = replace(row, dtype=getattr(torch, setting["dtype"])) if "dtype" in setting else row
        expected, bounds = reference(row)
        store = f"file://{folder}/store"
        patience = datetime.timedelta(seconds=3600)  # it is the parent that ends a hang
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)
        report = judge(peer.attend(Call(row, *shape, setting)), expected, bounds)
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        raised = f"{type(error).__name__}: {lines[0].strip()}"
        report = {"raised": raised, "at": time.monotonic(), "where": where[-3:]}
    unfinished = Path(folder) / f"unfinished-{rank}"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(Path(folder) / f"rank-{rank}.json")
    # A rank that left would close its connections, and the others might still be reading: the parent ends them all.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def silence() -> None:
    """Peers and gloo print; what they raise is recorded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def attempt(
    peer: ModuleType, row: Row, shape: tuple[int, int], setting: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """One row, one way, one setting, on as many ranks as the way has."""
    world = shape[0] * shape[1]
    start = time.monotonic()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=be_rank, args=(peer, row, shape, setting, rank, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        deadline = start + timeout
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
            reports = read(folder, ranks)
            if any(report and ("raised" in report or "died" in report) for report in reports):
                deadline = min(deadline, time.monotonic() + GRACE)
            if None not in reports:
                break
        reports = read(folder, ranks)
        for process in ranks:
            process.kill()
            process.join()
    found = verdict(reports, row.S)
    first = min((report for report in reports if report and "raised" in report), key=lambda r: r["at"], default=None)
    found = {"setting": setting, **found, "seconds": round(time.monotonic() - start, 1)}
    return {**found, "where": first["where"]} if first else found


def read(folder: str, ranks: list[Any]) -> list[dict[str, Any] | None]:
    """What each rank has written by now."""
    reports: list[dict[str, Any] | None] = []
    for rank, process in enumerate(ranks):
        path = Path(folder) / f"rank-{rank}.json"
        if path.exists():
            reports.append(json.loads(path.read_text()))
        else:
            died = process.exitcode not in (None, 0)
            reports.append({"died": process.exitcode} if died else None)
    return reports


def cell(peer: ModuleType, row: Row, way: str, *, stand_ins: bool, timeout: float) -> dict[str, Any]:
    """Settings in turns, until one is exact."""
    shape, attempts = SHAPES[way], []
    for setting in peer.settings(row, *shape, stand_ins=stand_ins):
        attempts.append(attempt(peer, row, shape, setting, timeout))
        if attempts[-1]["verdict"] == "exact":
            break
    chosen = best(attempts)
    others = [other for other in attempts if other is not chosen]
    return {**chosen, **({"other attempts": others} if others else {})}


def main() -> None:
    """All cells of the request."""
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    peer = importlib.import_module(f"benchmarks.peers.{request['peer']}")
    found: dict[str, Any] = {"cells": {}}
    with contextlib.redirect_stdout(sys.stderr):
        peer.prepare(stand_ins=request["stand_ins"])
    for row in ROWS:
        if row.name not in request["rows"]:
            continue
        start = time.monotonic()
        ways = {
            way: cell(peer, row, way, stand_ins=request["stand_ins"], timeout=request["timeout"]) for way in peer.WAYS
        }
        found["cells"][row.name] = ways
        words = ", ".join(f"{way}: {outcome['verdict']}" for way, outcome in ways.items())
        print(f"  {row.name:<48} {words}   ({time.monotonic() - start:.1f} s)", flush=True)
    found["versions"] = {name: importlib.metadata.version(name) for name in ("torch", *peer.PACKAGES)}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
