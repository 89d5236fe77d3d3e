"""Worlds much larger than this machine trace into one graph, in one process with PyTorch's fake backend."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.attention.large_worlds import METHODS, call
from benchmarks.harness import fake_group

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("worlds", [("8",), ("64",)])
def test_so_many_ranks_are_one_graph_on_every_mesh(worlds):
    # On eight ranks "ring × 8" is the same as Ulysses.
    methods = ["Ulysses", "ring", "ring, 2-D", *(["ring × 8"] if worlds != ("8",) else [])]
    command = [sys.executable, "-m", "benchmarks.attention.large_worlds", "--worlds", *worlds, "--trace", *methods]
    done = subprocess.run([*command, "--no-record"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\d+) ranks, (.*) \(ring .*'graphs': (\d+)", done.stdout, re.MULTILINE)
    assert {(int(world), method) for world, method, _ in rows} == {
        (world, method) for world in map(int, worlds) for method in methods
    }
    assert {graphs for *_, graphs in rows} == {"1"}


# The numbers bound the functions that Python calls. Without a hop to each rank, a call costs the same on any number of
# ranks. 2-D grows with rows and columns.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "plan", "of_call"),
    [("Ulysses", 75_000, 300), ("ring, 2-D", 5_000, 700), ("ring × 8, 2-D", 7_500, 600), ("ring", 25_000, 25_000)],
)
def test_plan_and_call_on_512_ranks_are_bounded(method, plan, of_call):
    with fake_group(512):
        shape_of, options = METHODS[method]
        mesh = init_device_mesh("cpu", shape_of(dist.get_world_size()), mesh_dim_names=("ring", "ulysses"))
        counts = call(mesh, options)
    assert counts["plan, functions"] <= plan, counts
    assert counts["call, functions"] <= of_call, counts
