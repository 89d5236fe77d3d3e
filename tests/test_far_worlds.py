"""Worlds far past this machine trace into one graph, on one process with PyTorch's fake backend."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_8_and_64_ranks_are_one_graph_on_every_mesh():
    command = [sys.executable, "-m", "benchmarks.far_worlds", "--worlds", "8", "64", "--no-record"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ring (\d+) × ulysses (\d+): .* s, (\d+) graph", done.stdout, re.MULTILINE)
    assert {(int(ring), int(ulysses)) for ring, ulysses, _ in rows} == {(1, 8), (8, 1), (1, 64), (64, 1), (8, 8)}
    assert {graphs for *_, graphs in rows} == {"1"}
