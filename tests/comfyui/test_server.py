"""The node pack in ComfyUI itself: its server, prompt queue, detection, loaders, LoRA loader and sampler.

ComfyUI does not run a node again whose inputs are those of an earlier workflow, so each workflow has a seed of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import count
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.attention.one_device import relative_error as error
from tests.fleet.commands import find_free_port

pytestmark = pytest.mark.comfyui
ROOT = Path(__file__).parents[2]
SECONDS = 120.0
SEEDS = count(1)


class ComfyUI:
    """A running ComfyUI with the node pack of this repository, a tiny Wan, and the nodes for tests."""

    def __init__(self, folder):
        comfyui = Path(os.environ["COMFYUI"])  # `COMFYUI=path make test-comfyui`
        python = os.environ.get("COMFYUI_PYTHON", sys.executable)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [python, "-m", "tests.comfyui.files", str(comfyui), str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        shutil.copytree(ROOT / "comfyui_para_core", folder / "custom_nodes" / "comfyui_para_core")
        shutil.copytree(Path(__file__).parent / "random_text", folder / "custom_nodes" / "random_text")
        self.folder, self.log, self.port = folder, folder / "log.txt", find_free_port()
        flags = ["--cpu", "--use-pytorch-cross-attention", "--disable-api-nodes", "--base-directory", str(folder)]
        flags += ["--port", str(self.port), "--cache-lru", "60", "--database-url", "sqlite:///:memory:"]
        with self.log.open("w") as log:
            command = [python, str(comfyui / "main.py"), *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        self.until(self.answers)

    def until(self, condition):
        """Wait until ``condition()`` is true."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(self.log.read_text()[-3000:])
            time.sleep(0.1)

    def answers(self):
        try:
            return bool(self.ask("/system_stats"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, path, body=None):
        """Return the answer to GET, or with a body, to POST."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=SECONDS) as answer:
            return json.loads(answer.read() or b"{}")

    def start(self, prompt):
        """Put a workflow into the queue, and return its id."""
        return self.ask("/prompt", {"prompt": prompt})["prompt_id"]

    def wait(self, prompt_id):
        """Return the history of a workflow, after it has ended."""
        self.until(lambda: prompt_id in self.ask(f"/history/{prompt_id}"))
        return self.ask(f"/history/{prompt_id}")[prompt_id]

    def latent(self, prompt):
        """Return the latent that a workflow saved. Raise RuntimeError with the message of the node that failed."""
        history = self.wait(self.start(prompt))
        errors = [body for kind, body in history["status"]["messages"] if kind == "execution_error"]
        if history["status"]["status_str"] != "success":
            raise RuntimeError("\n".join(str(error.get("exception_message")) for error in errors))
        (saved,) = [entry for output in history["outputs"].values() for entry in output.get("latents", [])]
        return load_file(self.folder / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]

    def processes(self):
        """Return the ids of the processes that ComfyUI started and that still run."""
        return {child.pid for child in psutil.Process(self.process.pid).children() if child.status() != "zombie"}

    def unload(self):
        self.ask("/free", {"unload_models": True})
        self.until(lambda: not self.processes())


def workflow(ranks, *, lora=None, steps=4, seed=1, close=False):
    """Return a workflow, text to video on Wan, in ComfyUI's API format. ``ranks`` None is ComfyUI's own loader."""
    nodes = {}

    def node(kind, **inputs):
        name = str(len(nodes) + 1)
        nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    if ranks is None:
        model = node("UNETLoader", unet_name="wan.safetensors", weight_dtype="default")
    else:
        inputs = {"mesh": "auto", "cache": 0.0, "weights": "replicated", "weight_dtype": "default"}
        model = node("ParaCoreLoadOnRanks", unet_name="wan.safetensors", ranks=ranks, **inputs)
    if lora is not None:
        model = node("LoraLoaderModelOnly", model=model, lora_name="lora.safetensors", strength_model=lora)
    model = node("ModelSamplingSD3", model=model, shift=8.0)
    latent = node("EmptyHunyuanLatentVideo", width=112, height=80, length=9, batch_size=1)
    positive = node("TestRandomText", text="a red ball")
    inputs = {"seed": seed, "steps": steps, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    texts = {"positive": positive, "negative": node("TestRandomText", text="")}
    sampled = node("KSampler", model=model, latent_image=latent, **texts, **inputs)
    if close:
        sampled = node("ParaCoreCloseRanks", model=model, samples=sampled)
    node("SaveLatent", samples=sampled, filename_prefix="latents/test")
    return nodes


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory):
    server = ComfyUI(tmp_path_factory.mktemp("comfyui"))
    yield server
    server.process.kill()
    server.process.wait()


def require_equal(comfyui, ranks, **options):
    """Run the same workflow on ComfyUI alone and on ranks, and compare the latents."""
    options = {"seed": next(SEEDS), **options}
    expected = comfyui.latent(workflow(None, **options))
    assert error(comfyui.latent(workflow(ranks, **options)), expected) < 1e-5
    return expected


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_workflow_with_a_lora_equals_comfyui_alone(comfyui, ranks):
    seed = next(SEEDS)
    without = require_equal(comfyui, ranks, seed=seed)
    assert len(comfyui.processes()) >= ranks
    assert error(require_equal(comfyui, ranks, seed=seed, lora=0.8), without) > 1e-3
    require_equal(comfyui, ranks, lora=0.4)


def test_interrupt_keeps_the_ranks_and_unloading_and_the_close_node_end_them(comfyui):
    # The ranks of other loaders end whenever ComfyUI forgets their nodes.
    comfyui.unload()
    comfyui.latent(workflow(2, seed=next(SEEDS)))
    processes = comfyui.processes()
    assert len(processes) == 2
    prompt = comfyui.start(workflow(2, steps=5000, seed=next(SEEDS)))
    time.sleep(2)
    comfyui.ask("/interrupt", {})
    assert "execution_interrupted" in [kind for kind, _ in comfyui.wait(prompt)["status"]["messages"]]
    require_equal(comfyui, 2, lora=0.8)
    assert comfyui.processes() == processes
    comfyui.unload()
    require_equal(comfyui, 2, lora=0.8)
    assert len(comfyui.processes()) == 2
    assert not processes & comfyui.processes()
    comfyui.unload()
    seed = next(SEEDS)
    expected = comfyui.latent(workflow(None, seed=seed))
    assert error(comfyui.latent(workflow(2, seed=seed, close=True)), expected) < 1e-5
    comfyui.until(lambda: not comfyui.processes())
