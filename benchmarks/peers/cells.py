"""One peer's cells, in a Python that has the peer:  python -m benchmarks.peers.cells REQUEST RESULT

It reads a request (JSON: peer, names of rows, stand_ins, timeout), and writes the outcome of every cell. The peer is
imported once. Each attempt then forks one process per rank, so that anything that an attempt breaks ends with it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import relative_error
from benchmarks.peers.callers import CALLERS, Caller
from benchmarks.peers.rows import ROWS, Call, RankOutput, Row

# -- From the results of the ranks of one attempt to a verdict.


# Float32 sums in another order differ by about 1e-7. A wrong weight anywhere differs by far more than this.
EXACT = 1e-5
# In half precision the bound is this multiple of the error of one device in that precision. Both errors are relative to
# float64.
HALF_PRECISION = 2
# A rank raises these because another one has ended. The other rank has the reason.
LOST_CONNECTION = re.compile(r"Connection (reset|closed|refused)|Socket closed", re.IGNORECASE)
# Only messages that name a device, or a package for one, demand CUDA. All other errors are refusals.
DEMANDS_CUDA = re.compile(r"cuda|flash_?attn is not|FlashAttention is not available|\bGPU", re.IGNORECASE)


def verdict(ranks: list[dict[str, Any] | None], tokens: int) -> dict[str, Any]:
    """Return the outcome of one attempt.

    Args:
        ranks: what each rank wrote: ``{"errors": {...}, "bounds": {...}, "positions": [...]}``, or ``{"raised": first
            line, "at": seconds}``, or ``{"died": exit code}``; None if it had written nothing when time was up.
        tokens: number of tokens of the whole sequence.

    Returns:
        ``verdict``, and its basis: ``error`` (the worst relative error of all ranks), or ``message``.
    """
    raised = sorted((rank["at"], rank["raised"]) for rank in ranks if rank and "raised" in rank)
    own = [message for _, message in raised if not LOST_CONNECTION.search(message)]
    died = [rank["died"] for rank in ranks if rank and "died" in rank]
    if died and not own:
        return {"verdict": "crashes", "message": f"a rank's process ended with exit code {died[0]}"}
    if raised:
        message = own[0] if own else raised[0][1]
        outcome = {"verdict": "needs CUDA" if DEMANDS_CUDA.search(message) else "refused", "message": message}
        waiting = [number for number, rank in enumerate(ranks) if rank is None]
        return {**outcome, "ranks left waiting": waiting} if waiting else outcome
    if None in ranks:
        return {"verdict": "hangs"}
    errors = {name: max(rank["errors"][name] for rank in ranks) for name in ranks[0]["errors"]}
    outcome: dict[str, Any] = {"error": max(errors.values())}
    if len(errors) > 1:
        outcome["errors"] = errors
    if {position for rank in ranks for position in rank["positions"]} != set(range(tokens)):
        return {"verdict": "wrong", **outcome, "message": "some tokens were computed by no rank"}
    within = all(error <= ranks[0]["bounds"][name] for name, error in errors.items())
    return {"verdict": "exact" if within else "wrong", **outcome}


def best(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first attempt that is exact, otherwise the first one, to which the peer's documentation leads."""
    return next((attempt for attempt in attempts if attempt["verdict"] == "exact"), attempts[0])


# -- Running.


# Each way has (ring, ulysses).
SHAPES = {"Ulysses": (1, 2), "ring": (2, 1), "2 × 2": (2, 2)}
# After one rank has raised, the others may be waiting for it for ever.
GRACE = 3


NAMES = ("out", "gradient of query", "gradient of key", "gradient of value")


def judge(part: RankOutput, expected: list[Tensor], bounds: list[float]) -> dict[str, Any]:
    """Return the report of a rank on its part: relative errors, and the bounds above which they are not rounding."""
    held = (part.positions, part.positions, part.key_positions, part.key_positions)
    compared = zip(NAMES, [part.out, *part.gradients], expected, held, bounds, strict=False)
    errors, allowed = {}, {}
    for name, output, whole, positions, bound in compared:
        errors[name] = relative_error(output, whole.index_select(2, positions))
        allowed[name] = bound
    return {"errors": errors, "bounds": allowed, "positions": part.positions.tolist()}


def reference(row: Row) -> tuple[list[Tensor], list[float]]:
    """Return the results of one device, and the bound for each of them."""
    if row.dtype == torch.float32:
        expected = row.on_one_device()
        return expected, [EXACT] * len(expected)
    exact = row.on_one_device(torch.float64)
    own = [relative_error(rounded, whole) for rounded, whole in zip(row.on_one_device(), exact, strict=True)]
    return exact, [HALF_PRECISION * error for error in own]


def be_rank(peer: Caller, row: Row, shape: tuple[int, int], setting: dict[str, Any], rank: int, folder: str) -> None:
    """Run one rank of one attempt, and write its report."""
    silence()
    parent = os.getppid()
    world = shape[0] * shape[1]
    try:
        # The kernels of some peers accept half precision only.
        row = replace(row, dtype=getattr(torch, setting["dtype"])) if "dtype" in setting else row
        expected, bounds = reference(row)
        store = f"file://{folder}/store"
        patience = datetime.timedelta(seconds=3600)  # The parent ends a hang, not this time-out.
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
    # A rank that left would close its connections while the others might still be reading, so the parent ends all of
    # them.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def silence() -> None:
    """Discard the output of peers and gloo. Their exceptions are recorded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def attempt(peer: Caller, row: Row, shape: tuple[int, int], setting: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Return the outcome of one row, one way and one setting, on the ranks of the way."""
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
    outcome = verdict(reports, row.S)
    first = min((report for report in reports if report and "raised" in report), key=lambda r: r["at"], default=None)
    outcome = {"setting": setting, **outcome, "seconds": round(time.monotonic() - start, 1)}
    return {**outcome, "where": first["where"]} if first else outcome


def read(folder: str, ranks: list[Any]) -> list[dict[str, Any] | None]:
    """Return the report that each rank has written by now, or None."""
    reports: list[dict[str, Any] | None] = []
    for rank, process in enumerate(ranks):
        path = Path(folder) / f"rank-{rank}.json"
        if path.exists():
            reports.append(json.loads(path.read_text()))
        else:
            died = process.exitcode not in (None, 0)
            reports.append({"died": process.exitcode} if died else None)
    return reports


def cell(peer: Caller, row: Row, way: str, *, stand_ins: bool, timeout: float) -> dict[str, Any]:
    """Try settings in turn until one is exact, and return the outcome."""
    shape, attempts = SHAPES[way], []
    for setting in peer.settings(row, *shape, stand_ins=stand_ins):
        attempts.append(attempt(peer, row, shape, setting, timeout))
        if attempts[-1]["verdict"] == "exact":
            break
    chosen = best(attempts)
    others = [other for other in attempts if other is not chosen]
    return {**chosen, **({"other attempts": others} if others else {})}


def main() -> None:
    """Run all cells of the request."""
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    peer = CALLERS[request["peer"]]
    results: dict[str, Any] = {"cells": {}}
    with contextlib.redirect_stdout(sys.stderr):
        peer.prepare(stand_ins=request["stand_ins"])
    rows = [row for row in ROWS if row.name in request["rows"]]
    if len(rows) == len(ROWS):
        results["own rows"], results["facts"] = {}, peer.facts()
        rows += peer.own_rows
    for row in rows:
        start, own = time.monotonic(), row in peer.own_rows
        ways = {
            way: cell(peer, row, way, stand_ins=request["stand_ins"], timeout=request["timeout"])
            for way in (peer.ways[:2] if own else peer.ways)
        }
        results["own rows" if own else "cells"][row.name] = ways
        words = ", ".join(f"{way}: {outcome['verdict']}" for way, outcome in ways.items())
        print(f"  {row.name:<48} {words}   ({time.monotonic() - start:.1f} s)", flush=True)
    results["versions"] = {name: importlib.metadata.version(name) for name in ("torch", *peer.packages)}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
