"""Starting a module of this folder as rank processes, and getting back what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def launch(module: str, num_ranks: int, *arguments: str) -> None:
    """Run ``python -m module arguments`` in ``num_ranks`` processes of one thread each, under torchrun if several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *torchrun, "-m", module, *arguments], check=True, env=environment)


def measured_on_ranks(module: str, num_ranks: int, *arguments: str) -> Any:
    """What ``python -m module arguments --part PATH`` writes to that path in :func:`write_part`, called by all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        launch(module, num_ranks, *arguments, "--part", str(path))
        return json.loads(path.read_text())


def write_part(path: Path, measure: Callable[[], Any]) -> None:
    """In a rank process: ``measure()`` over gloo; the first rank writes what it gives to ``path``, as JSON."""
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()
