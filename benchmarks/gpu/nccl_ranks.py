"""The steps of the section ``two_ranks`` on NCCL with ``device_id``: one process per visible GPU."""

from __future__ import annotations

import torch

from benchmarks.gpu.job import SectionJob
from benchmarks.gpu.processes import backend_of
from benchmarks.gpu.two_ranks import PARTS, TIMEOUT, add_part

MOST = 4  # Each stage needs a block, and the small model has six, so four ranks are most.
# These are the seconds of a part, including the start of Python on each rank. Parts run one after the other, because
# NCCL kernels of two groups of processes on the same devices would wait for each other's turn.
NEEDS = {part: 30.0 for part in PARTS if part != "exact"}


def run(job: SectionJob) -> None:
    on_cpu = job.device.type == "cpu"
    ranks = 1 if on_cpu else min(torch.cuda.device_count(), 2 if job.tiny else MOST)
    for part in ("bound device", "pipefusion") if job.tiny else NEEDS:
        if job.has_time(part, NEEDS[part]):
            add_part(
                job,
                part,
                ranks,
                backend=backend_of(job.device),
                seconds=100.0 if job.tiny else NEEDS[part],
                device_per_rank=not on_cpu,
                bind=True,
                timeout=min(TIMEOUT, NEEDS[part] - 10),
            )
