"""Hosts of two ranks each, with a torchrun on each, compared with one process; and ranks that fail."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from benchmarks.faults.__main__ import expected_image, run_cell
from benchmarks.faults.cells import Cell, verdict
from benchmarks.faults.hosts import NotAllowed, open_hosts, torchrun
from benchmarks.pipelines.latents import PIPELINES
from tests.tiny import relative_error

pytestmark = pytest.mark.nodes
FLUX = Path(__file__).parents[2] / "zoo/flux/pipeline"


def namespaces_or_skip(num_hosts):
    try:
        with open_hosts(num_hosts, namespaces=True):
            return
    except NotAllowed as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")


@pytest.mark.parametrize(("num_hosts", "namespaces"), [(3, True), (2, False)])
def test_several_hosts_equal_one_process(tmp_path, num_hosts, namespaces):
    if namespaces:
        namespaces_or_skip(num_hosts)
    expected = {
        name: PIPELINES[name].build()(**PIPELINES[name].call(), return_dict=False)[0] for name in ("flux", "wan")
    }
    with open_hosts(num_hosts, namespaces=namespaces) as hosts:
        torchrun(hosts, "tests.nodes.generate", str(tmp_path), *expected)
    for rank in range(2 * num_hosts):
        report = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert report["dims"] == {"ring": list(range(num_hosts)), "ulysses": [rank // 2] * 2}
        for name, image in expected.items():
            assert relative_error(report["images"][name], image) < 1e-5, f"{name} on rank {rank}"


def kill_rank_once_a_file_is_there(rank, file, killed):
    """Kill this rank of the run that writes to the folder of ``file``."""
    deadline = time.monotonic() + 400
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (folder / "environ").read_text(), (folder / "cmdline").read_text()
        except OSError:  # The process has ended meanwhile.
            continue
        if f"\0RANK={rank}\0" in f"\0{environment}\0" and str(file.parent) in command:
            os.kill(int(folder.name), signal.SIGKILL)
            killed.append(folder.name)


def test_lost_rank_ends_all_and_next_attempt_finishes(tmp_path):
    output, killed = tmp_path / "images", []
    killer = threading.Thread(target=kill_rank_once_a_file_is_there, args=(3, output / "0.png", killed))
    arguments = ["--model", str(FLUX), "--size", "128", "--output", str(output)]
    options = {"options": ["--max-restarts=2"], "environment": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
    with open_hosts(2) as hosts:
        killer.start()
        printed = torchrun(hosts, "parallel_examples.run_elastic", *arguments, seconds=500, **options)
        killer.join()
    assert len(killed) == 1
    # A torchrun that restarts because another one did does not count that attempt.
    first, *_, last = re.findall(r"attempt \d+: images (\[.*?\])", printed[0])
    assert first == "[0, 1, 2]"
    assert last in ("[1, 2]", "[2]")
    assert sorted(path.name for path in output.iterdir()) == ["0.png", "1.png", "2.png"]
    pipe = FluxPipeline.from_pretrained(FLUX, dtype=torch.float32)
    # These are the prompts of the example.
    for seed, prompt in enumerate(("a large red circle", "a small blue square", "a green triangle")):
        image = pipe(prompt, generator=torch.Generator().manual_seed(seed), height=128, width=128).images[0]
        # Another order of sums may round to the other side.
        difference = np.asarray(Image.open(output / f"{seed}.png"), dtype=int) - np.asarray(image, dtype=int)
        assert np.abs(difference).max() <= 1


# -- A few cells of the table of faults, on loopback addresses. `python -m benchmarks.faults` runs all.


@pytest.mark.parametrize(
    ("fault", "moment"), [("killed", "inside attention"), ("stopped", "in the VAE"), ("raises", "between steps")]
)
def test_a_fault_ends_all_ranks_with_its_cause(fault, moment):
    with open_hosts(2, namespaces=False) as hosts:
        outcome = run_cell(Cell("flux", "ring 2 × Ulysses 2", fault, moment), hosts, expected_image("flux"))
    assert verdict(outcome) == "good", outcome
