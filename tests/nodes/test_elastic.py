"""A rank is killed during a generation: the others end, torchrun starts again, and no image is lost or half-written."""

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

from tests.nodes.hosts import open_hosts, torchrun

pytestmark = pytest.mark.nodes
ROOT = Path(__file__).parents[2]
# These are the prompts of parallel_examples/run_elastic.py.
PROMPTS = ["a large red circle", "a small blue square", "a green triangle"]


def rank_processes(rank, output):
    """Return the ids of the processes that are this rank of the run that writes to ``output``."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = f"\0{(folder / 'environ').read_text()}\0"
            if f"\0RANK={rank}\0" in environment and str(output) in (folder / "cmdline").read_text():
                pids.append(int(folder.name))
        except OSError:  # The process has ended meanwhile.
            continue
    return pids


def kill_once_the_first_image_is_there(rank, output, killed):
    deadline = time.monotonic() + 400
    while not (output / "0.png").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in rank_processes(rank, output):
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)


def one_process():
    pipe = FluxPipeline.from_pretrained(ROOT / "zoo/flux/pipeline", dtype=torch.float32)
    options = {"height": 128, "width": 128}
    return [
        np.asarray(pipe(prompt, generator=torch.Generator().manual_seed(seed), **options).images[0], dtype=int)
        for seed, prompt in enumerate(PROMPTS)
    ]


def test_lost_rank_ends_all_and_next_attempt_finishes(tmp_path):
    output, killed = tmp_path / "images", []
    killer = threading.Thread(target=kill_once_the_first_image_is_there, args=(3, output, killed))
    with open_hosts(2) as hosts:
        killer.start()
        arguments = ["--model", str(ROOT / "zoo/flux/pipeline"), "--size", "128", "--output", str(output)]
        printed = torchrun(
            hosts,
            "parallel_examples.run_elastic",
            *arguments,
            options=["--max-restarts=2"],
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            seconds=500,
        )
        killer.join()
    assert len(killed) == 1
    # A torchrun that restarts because another one did does not count that attempt.
    first, *_, last = re.findall(r"attempt \d+: images (\[.*?\])", printed[0])
    assert first == "[0, 1, 2]"
    assert last in ("[1, 2]", "[2]")
    assert sorted(path.name for path in output.iterdir()) == ["0.png", "1.png", "2.png"]
    for name, expected in enumerate(one_process()):
        # Another order of sums may round to the other side.
        assert np.abs(np.asarray(Image.open(output / f"{name}.png"), dtype=int) - expected).max() <= 1
