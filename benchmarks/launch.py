"""Starting a module of this folder as rank processes."""

from __future__ import annotations

import os
import subprocess
import sys


def launch(module: str, num_ranks: int, *arguments: str) -> None:
    """Run ``python -m module arguments`` in ``num_ranks`` processes of one thread each, under torchrun if several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *torchrun, "-m", module, *arguments], check=True, env=environment)
