"""ComfyUI's own server in a folder of its own, and its HTTP API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SECONDS = 120.0


class ComfyUI:
    """A running ComfyUI with the node pack of this repository, a tiny Wan, and the nodes for tests."""

    def __init__(self, comfyui: Path, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [python, "-m", "tests.comfyui.files", str(comfyui), str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        shutil.copytree(ROOT / "comfyui_para_core", folder / "custom_nodes" / "comfyui_para_core")
        shutil.copytree(Path(__file__).parent / "random_text", folder / "custom_nodes" / "random_text")
        self.log = folder / "log.txt"
        # Another program may take the port while ComfyUI starts.
        for _ in range(3):
            if self._start(python, comfyui, environment):
                return
        raise RuntimeError(f"ComfyUI did not start:\n{self.log.read_text()[-3000:]}")

    def _start(self, python: str, comfyui: Path, environment: dict[str, str]) -> bool:
        """Start ComfyUI at a free port, and return whether it answers."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        flags = ["--cpu", "--use-pytorch-cross-attention", "--disable-api-nodes", "--base-directory", str(self.folder)]
        flags += ["--preview-method", "latent2rgb", "--port", str(self.port), "--cache-lru", "60"]
        flags += ["--database-url", "sqlite:///:memory:"]
        command = [python, str(comfyui / "main.py"), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.version = self.get("/system_stats")["system"]["comfyui_version"]
                return True
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        self.close()
        return False

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=SECONDS) as answer:
            return json.loads(answer.read() or b"{}")

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.loads(answer.read() or b"{}")

    def start(self, prompt: dict) -> str:
        """Put a workflow into the queue, and return its id."""
        return self.post("/prompt", {"prompt": prompt})["prompt_id"]

    def wait(self, prompt_id: str) -> dict:
        """Return the history of a workflow, after it has ended."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text()[-3000:])

    def latent(self, prompt: dict) -> object:
        """Return the latent that a workflow saved. Raise RuntimeError with the message of the node that failed."""
        history = self.wait(self.start(prompt))
        if history["status"]["status_str"] != "success":
            raise RuntimeError(self.error(history))
        (saved,) = [entry for output in history["outputs"].values() for entry in output.get("latents", [])]
        return load_file(self.folder / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]

    def error(self, history: dict) -> str:
        messages = [body for kind, body in history["status"]["messages"] if kind == "execution_error"]
        return "\n".join(str(message.get("exception_message")) for message in messages)

    def processes(self) -> set[int]:
        """Return the ids of the processes that ComfyUI started and that still run."""
        return {child.pid for child in psutil.Process(self.process.pid).children() if child.status() != "zombie"}

    def ranks(self) -> int:
        return len(self.processes())

    def wait_for_ranks(self, number: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.ranks() != number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.ranks()} ranks run; expected {number}.")
            time.sleep(0.1)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def workflow(
    ranks: int | None,
    *,
    lora: float | None = None,
    patch: str = "",
    steps: int = 4,
    seed: int = 1,
    text: str = "a red ball",
    close: bool = False,
    weight_dtype: str = "default",
    **settings: object,
) -> dict:
    """Return a workflow, text to video on Wan, in ComfyUI's API format. ``ranks`` None is ComfyUI's own loader."""
    nodes: dict[str, dict] = {}

    def node(kind: str, **inputs: object) -> list:
        name = str(len(nodes) + 1)
        nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    if ranks is None:
        model = node("UNETLoader", unet_name="wan.safetensors", weight_dtype=weight_dtype)
    else:
        inputs = {"mesh": "auto", "cache": 0.0, "weights": "replicated", "weight_dtype": weight_dtype, **settings}
        model = node("ParaCoreLoadOnRanks", unet_name="wan.safetensors", ranks=ranks, **inputs)
    if lora is not None:
        model = node("LoraLoaderModelOnly", model=model, lora_name="lora.safetensors", strength_model=lora)
    if patch == "easycache":
        model = node("EasyCache", model=model, reuse_threshold=0.5, start_percent=0.1, end_percent=0.95, verbose=False)
    elif patch == "windows":
        model = node(
            "WanContextWindowsManual",
            model=model,
            context_length=5,
            context_overlap=1,
            context_schedule="standard_static",
            context_stride=1,
            closed_loop=False,
            fuse_method="pyramid",
            freenoise=False,
            retain_first_frame=False,
            split_conds_to_windows=False,
        )
    elif patch == "compile":
        model = node("TorchCompileModel", model=model, backend="inductor")
    elif patch == "rope":
        scales = {"scale_x": 1.5, "scale_y": 1.5, "scale_t": 1.2, "shift_x": 0.5, "shift_y": 0.0, "shift_t": 0.0}
        model = node("ScaleROPE", model=model, **scales)
    elif patch and patch != "hook":
        model = node("TestPatched", model=model, how=patch)
    model = node("ModelSamplingSD3", model=model, shift=8.0)
    latent = node("EmptyHunyuanLatentVideo", width=112, height=80, length=9, batch_size=1)
    positive = node("TestRandomText", text=text)
    if patch == "hook":
        hook = node("CreateHookLoraModelOnly", lora_name="lora.safetensors", strength_model=0.8)
        positive = node(
            "ConditioningSetProperties", cond_NEW=positive, strength=1.0, set_cond_area="default", hooks=hook
        )
    sampled = node(
        "KSampler",
        model=model,
        positive=positive,
        negative=node("TestRandomText", text=""),
        latent_image=latent,
        seed=seed,
        steps=steps,
        cfg=4.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    if close:
        sampled = node("ParaCoreCloseRanks", model=model, samples=sampled)
    node("SaveLatent", samples=sampled, filename_prefix="latents/test")
    return nodes
