"""Programs of users on simulated GPUs: examples and commands, each in processes of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.simulated_gpu.__main__ import faults, reports, run
from zoo.flux import PIPELINE as FLUX

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def on_gpus(folder: Path, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the output of a program and the faults of all its processes."""
    records = folder / "records"
    records.mkdir()
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 500, "cwd": folder}
    done = run(arguments, records, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, **options)
    assert done.returncode == 0, done.stdout[-3000:]
    found = reports(records)
    assert found, f"no process used the device:\n{done.stdout[-3000:]}"
    return done.stdout, list(faults(found))


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
dist.all_reduce(torch.ones(2, device="cuda"), async_op=True)
print(f"error {error < 1e-2}\\n", end="")  # One write, because two ranks share the pipe.
dist.destroy_process_group()
"""


def test_fault_of_a_program_of_two_ranks_is_found(tmp_path):
    (tmp_path / "one_call.py").write_text(ONE_CALL)
    output, found = on_gpus(tmp_path, [*TORCHRUN, "one_call.py"])
    assert output.count("error True") == 2
    # Nothing but the last line is wrong.
    assert len(found) == 2 and all("never waited" in text for text in found), found


# The command line of examples and commands, without Python.
SIZE = ("--model", str(FLUX), "--size", "32")
PROGRAMS: dict[str, list[str]] = {
    "own model": [*TORCHRUN, str(ROOT / "parallel_examples" / "run_own_model.py")],
    "FLUX, launched": [str(ROOT / "parallel_examples" / "launch_flux.py"), *SIZE, "--ranks", "2"],
    "FLUX, cached": [str(ROOT / "cache_examples" / "run_flux.py"), *SIZE],
    "PipeFusion": [*TORCHRUN, str(ROOT / "parallel_examples" / "run_pipefusion.py"), *SIZE],
    "bench": ["-m", "para_core", "bench", "--ranks", "2", "--size", "32x32", "--steps", "2", "--runs", "1", "--check"],
    "doctor": [*TORCHRUN, "-m", "para_core", "doctor"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_a_user(tmp_path, name):
    assert on_gpus(tmp_path, PROGRAMS[name])[1] == []
