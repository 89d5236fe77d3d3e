"""A launched pipeline in a Jupyter notebook."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests.launcher.loads import alive, require_no_process

pytestmark = pytest.mark.slow

CELLS = [
    """
from para_core import launch
import torch

def load():
    from diffusers import FluxPipeline
    from para_core.adapters import parallelize_pipe
    from zoo.flux import PIPELINE
    print("printed in load")
    return parallelize_pipe(FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32))

pipe = launch(load, ranks=2)
""",
    """
arguments = {"height": 64, "width": 64, "num_inference_steps": 3}
steps = []
image = pipe("a red circle", callback_on_step_end=lambda p, i, t, d: steps.append(i) or d, **arguments).images[0]
image
""",
    """
import os
print(steps, pipe.run(lambda p: os.getpid(), all_ranks=True))
""",
    """
print("running")
pipe("a red circle", **{**arguments, "num_inference_steps": 100_000})
""",
    """
print(pipe.run(lambda p: os.getpid(), all_ranks=True), len(pipe("a blue square", **arguments).images))
""",
    """
pipe("a", unknown=1)
""",
]


def text(cell):
    """Return what a cell has printed, and the names and messages of its errors."""
    return "".join(x.get("text", "") or f"{x.get('ename', '')}: {x.get('evalue', '')}" for x in cell.outputs)


def interrupt_when_running(process):
    """Send SIGINT to the process group of the kernel, as Jupyter does, once the ranks compute steps."""
    kernel = psutil.Process(process)
    deadline = time.monotonic() + 60
    while len(kernel.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    os.killpg(os.getpgid(process), signal.SIGINT)


def test_notebook_calls_interrupts_and_ends(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    # With this variable ipykernel does not show what child processes print.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True)
    with client.setup_kernel():
        kernel = client.km.provisioner.pid
        for index, cell in enumerate(notebook.cells):
            if index == 3:
                threading.Thread(target=interrupt_when_running, args=(kernel,), daemon=True).start()
            client.execute_cell(cell, index)
        loaded, shown, ranks, interrupted, after, failed = notebook.cells
        processes = [int(pid) for pid in re.search(r"\[(\d+), (\d+)\]$", text(ranks).strip()).groups()]
        assert "printed in load" in text(loaded)
        assert any("image/png" in output.get("data", {}) for output in shown.outputs)
        assert text(ranks).startswith("[0, 1, 2] ")
        assert "KeyboardInterrupt" in text(interrupted)
        assert str(processes) in text(after), "the ranks started again"
        assert "TypeError" in text(failed)
        assert "unknown" in text(failed)
        assert len(alive(processes)) == 2
        os.kill(kernel, signal.SIGKILL)
        require_no_process(processes, seconds=15)
