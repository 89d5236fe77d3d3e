"""The steps of the section ``two_ranks`` on NCCL with ``device_id``: one process per visible GPU."""

from __future__ import annotations

import torch

from benchmarks.gpu.job import SectionJob
from benchmarks.gpu.processes import run_ranks
from benchmarks.gpu.two_ranks import PARTS, TIMEOUT, add_rows, rows_of_part

MOST = 4  # Each stage needs a block, and the small model has six, so four ranks are most.
# These are the seconds of a part, including the start of Python on each rank. Parts run one after the other, because
# NCCL kernels of two groups of processes on the same devices would wait for each other's turn.
NEEDS = {part: 75.0 if part == "reduce-overhead" else 30.0 for part in PARTS if part != "exact"}


def run(job: SectionJob) -> None:
    on_cpu = job.device.type == "cpu"
    ranks = 1 if on_cpu else min(torch.cuda.device_count(), MOST)
    backend = "gloo" if on_cpu else "nccl"
    for part in ("bound device", "pipefusion") if job.tiny else NEEDS:
        if not job.has_time(part, NEEDS[part]):
            continue
        rows, errors = run_ranks(
            rows_of_part,
            ranks,
            part,
            device=job.device,
            backend=backend,
            seconds=100.0 if job.tiny else NEEDS[part],
            device_per_rank=not on_cpu,
            bind=True,
            timeout=min(TIMEOUT, NEEDS[part] - 10),
        )
        add_rows(job, rows, errors, group=f"{backend}, {ranks} rank(s)")
