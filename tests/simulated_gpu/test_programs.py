"""Programs of users on simulated GPUs: examples, commands and servers, each in processes of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulated_gpu.__main__ import faults, reports, run

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def on_gpus(tmp_path) -> Callable[..., tuple[str, list[str]]]:
    """Return a function that runs a program and returns its output and the faults of all its processes."""

    def start(*arguments: str) -> tuple[str, list[str]]:
        folder = tmp_path / "records"
        folder.mkdir()
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = run(
            [*arguments],
            folder,
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        found = reports(folder)
        assert found, f"no process used the device:\n{done.stdout[-3000:]}"
        return done.stdout, list(faults(found))

    return start


ONE_CALL = """
import os, torch, torch.distributed as dist, torch.nn.functional as F
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
from para_core import UnifiedAttnMode, init_context_parallel_mesh
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
with torch.no_grad(), UnifiedAttnMode(init_context_parallel_mesh("cuda")) as cp:
    out = cp.gather(F.scaled_dot_product_attention(*[cp.shard(x, dim=2) for x in (q, k, v)]), dim=2)
error = (out - F.scaled_dot_product_attention(q, k, v)).float().norm().item()
if {broken}:
    dist.all_reduce(torch.ones(2, device="cuda"), async_op=True)
print("error", error < 1e-2, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("broken", [False, True])
def test_program_of_two_ranks(on_gpus, tmp_path, broken):
    program = tmp_path / "one_call.py"
    program.write_text(ONE_CALL.replace("{broken}", str(broken)))
    output, found = on_gpus(*TORCHRUN, str(program))
    assert output.count("error True") == 2
    assert any("never waited" in text for text in found) if broken else not found
