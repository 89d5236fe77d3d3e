"""Programs of users on simulated GPUs: examples, commands and servers, each in processes of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulated_gpu.__main__ import faults, reports, run
from zoo.flux import PIPELINE as FLUX

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def on_gpus(tmp_path) -> Callable[..., tuple[str, list[str]]]:
    """Return a function that runs a program and returns its output and the faults of all its processes."""

    def start(*arguments: str) -> tuple[str, list[str]]:
        folder = tmp_path / "records"
        folder.mkdir()
        done = run(
            [*arguments],
            folder,
            env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
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
print(f"error {error < 1e-2}\\n", end="")  # One write, because two ranks share the pipe.
dist.destroy_process_group()
"""


@pytest.mark.parametrize("broken", [False, True])
def test_program_of_two_ranks(on_gpus, tmp_path, broken):
    program = tmp_path / "one_call.py"
    program.write_text(ONE_CALL.replace("{broken}", str(broken)))
    output, found = on_gpus(*TORCHRUN, str(program))
    assert output.count("error True") == 2
    assert any("never waited" in text for text in found) if broken else not found


# -- The examples, commands, and ranks that one process drives.

PARALLEL, CACHE = ROOT / "parallel_examples", ROOT / "cache_examples"
SIZE = ("--model", str(FLUX), "--size", "32")
GENERATE = (
    "-m",
    "para_core",
    "generate",
    "--prompt",
    "a red circle",
    "--size",
    "32x32",
    "--steps",
    "2",
    "--out",
    "images",
)
# Name: the command line, without Python.
PROGRAMS: dict[str, list[str]] = {
    "an own model": [*TORCHRUN, str(PARALLEL / "run_own_model.py")],
    "FLUX": [*TORCHRUN, str(PARALLEL / "run_flux.py"), *SIZE],
    "FLUX, launched": [str(PARALLEL / "launch_flux.py"), *SIZE, "--ranks", "2"],
    "FLUX, cached": [str(CACHE / "run_flux.py"), *SIZE],
    "PipeFusion": [*TORCHRUN, str(PARALLEL / "run_pipefusion.py"), *SIZE],
    "generate": [*GENERATE],
    "generate on two ranks": [*GENERATE, "--ranks", "2"],
    "bench": ["-m", "para_core", "bench", "--ranks", "2", "--size", "32x32", "--steps", "2", "--runs", "1", "--check"],
    "doctor": [*TORCHRUN, "-m", "para_core", "doctor"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_a_user(on_gpus, name):
    _, found = on_gpus(*PROGRAMS[name])
    assert found == []


@pytest.mark.long
def test_server_with_two_ranks(on_gpus):
    output, found = on_gpus("-c", CLIENT)
    assert "images 2" in output
    assert found == []


# It starts a server on two ranks, asks for two images, and ends the server as Ctrl-C does.
CLIENT = """
import json, signal, subprocess, sys, time, urllib.request
server = subprocess.Popen([sys.executable, "-m", "para_core", "serve", "--ranks", "2", "--port", "18763"])
body = json.dumps({"prompt": "a red circle", "size": "32x32", "n": 2, "response_format": "b64_json"}).encode()
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:18763/v1/images/generations", body, headers)
for _ in range(300):
    try:
        images = json.load(urllib.request.urlopen(request, timeout=300))["data"]
        break
    except urllib.error.URLError as error:
        assert server.poll() is None, error
        time.sleep(1)
server.send_signal(signal.SIGINT)
server.wait(60)
print("images", len(images), flush=True)
"""
