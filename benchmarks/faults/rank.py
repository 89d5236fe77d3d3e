"""One rank of one cell: what a user's program does, and the fault."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults import strike
from benchmarks.faults.cells import END, FAULTY_RANK, SIZES, STEPS, Cell
from benchmarks.faults.pipes import build, call_of
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

TIMEOUT = 8.0  # seconds that a collective waits
SLEEP = TIMEOUT + 6.0


def run_rank(cell: Cell, rank: int, folder: Path, store: tuple[str, int], expected: Any) -> None:
    """Generate as a user's program would, and write what came of it; ends as that program would end."""
    report: dict[str, Any] = {}
    try:
        _connect(rank, store)
        image = _generate(cell, rank, folder)
        error = float((image - expected).norm() / expected.norm()) if image.shape == expected.shape else float("inf")
        report = {"error": error}
    except BaseException as raised:
        traceback.print_exc()
        report = {"raised": type(raised).__name__, "message": str(raised)}
    finally:
        report["seconds to the end of the call"] = time.monotonic()
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
        sys.stderr.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(rank: int, store: tuple[str, int]) -> None:
    """As under torchrun: its agent, and no rank, holds the store."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": rank % 2,
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))


def _generate(cell: Cell, rank: int, folder: Path) -> Any:
    ring, ulysses = SIZES[cell.mesh]
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
    pipe = parallelize_pipe(build(cell.pipeline), mesh=mesh, vae=True, timeout=TIMEOUT)

    def note() -> None:
        (folder / "struck at").write_text(str(time.monotonic()))

    with torch.no_grad():
        if cell.of_call:
            return _generate_otherwise(cell, pipe, note if rank == FAULTY_RANK else None)
        if rank != FAULTY_RANK:
            # All have a callback, or none: they would be told of it.
            more = {"callback_on_step_end": strike.unchanging_callback} if cell.moment == STEPS else {}
            return pipe(**call_of(cell.pipeline, **more))[0]
        struck = strike.link_fault(folder, note) if cell.of_link else strike.process_fault(cell.fault, note, SLEEP)
        with strike.at(cell.moment, pipe, struck) as more:
            return pipe(**call_of(cell.pipeline, **more))[0]


def _generate_otherwise(cell: Cell, pipe: Any, note: Any) -> Any:
    if cell.moment == END:
        pipe(**call_of(cell.pipeline))
    more: dict[str, Any] = {}
    if note is not None:
        more = strike.given(cell, pipe, note)
    elif cell.moment == STEPS:
        names = ["latents", "prompt_embeds"]
        more = {"callback_on_step_end": strike.unchanging_callback, "callback_on_step_end_tensor_inputs": names}
    return pipe(**call_of(cell.pipeline, **more))[0]
