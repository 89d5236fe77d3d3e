"""The node pack in ComfyUI itself: its server, prompt queue, detection, loaders, LoRA loader and sampler.

ComfyUI does not run a node again whose inputs are those of an earlier workflow, so each test has seeds of its own.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import torch

from tests.comfyui.server import ROOT, ComfyUI, workflow

pytestmark = pytest.mark.comfyui
SEEDS = count(1)


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory):
    path = Path(os.environ["COMFYUI"])  # `COMFYUI=path make test-comfyui`
    python = {"python": os.environ["COMFYUI_PYTHON"]} if "COMFYUI_PYTHON" in os.environ else {}
    server = ComfyUI(path, tmp_path_factory.mktemp("comfyui"), **python)
    yield server
    server.close()


def error(out, expected):
    return float((out - expected).norm() / expected.norm())


def require_equal(comfyui, ranks, **options):
    """Run the same workflow on ComfyUI alone and on ranks, and compare the latents."""
    options = {"seed": next(SEEDS), **options}
    settings = {name: options.pop(name) for name in ("mesh", "weights") if name in options}
    expected = comfyui.latent(workflow(None, **options))
    assert error(comfyui.latent(workflow(ranks, **options, **settings)), expected) < 1e-5
    return expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_workflow_with_a_lora_equals_comfyui_alone(comfyui, ranks):
    seed = next(SEEDS)
    without = require_equal(comfyui, ranks, seed=seed)
    assert comfyui.ranks() >= ranks
    assert error(require_equal(comfyui, ranks, seed=seed, lora=0.8), without) > 1e-3
    require_equal(comfyui, ranks)
    require_equal(comfyui, ranks, lora=0.4)


def test_weights_in_parts_weights_in_8_bits_and_a_ring(comfyui):
    for lora in (None, 0.8, 0.3, None):
        require_equal(comfyui, 2, lora=lora, weights="fsdp")
    require_equal(comfyui, 2, mesh="ring 2")
    seed = next(SEEDS)
    full = comfyui.latent(workflow(None, seed=seed))
    assert error(require_equal(comfyui, 2, seed=seed, weight_dtype="fp8_e4m3fn"), full) > 1e-4


def test_the_cache_is_near_and_starts_again_for_each_prompt(comfyui):
    seed, other = next(SEEDS), next(SEEDS)
    expected = comfyui.latent(workflow(None, seed=seed))
    out = comfyui.latent(workflow(2, cache=0.2, seed=seed))
    assert 1e-4 < error(out, expected) < 0.2
    assert error(comfyui.latent(workflow(2, cache=0.2, seed=other)), out) > 0.1
    # A LoRA of strength 0 changes nothing, but ComfyUI runs the sampler again.
    assert torch.equal(comfyui.latent(workflow(2, cache=0.2, seed=seed, lora=0.0)), out)


@pytest.mark.parametrize(
    ("patch", "steps", "change"),
    [("wrapper", 4, 0.01), ("easycache", 12, 1e-4), ("windows", 4, 1e-3), ("rope", 4, 1e-3)],
)
def test_other_nodes_run_around_the_ranks_or_reach_them(comfyui, patch, steps, change):
    options = {"seed": next(SEEDS), "steps": steps}
    without = comfyui.latent(workflow(None, **options))
    assert error(require_equal(comfyui, 2, patch=patch, **options), without) > change


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("patches_replace", ["patches_replace", "dit", "Patched.patch"]),
        ("patches", ["patches", "double_block"]),
        ("attention", ["optimized_attention_override"]),
        ("unknown", ["a_key_of_another_pack"]),
        ("kind", ["a_kind_of_another_pack"]),
        ("object", ["diffusion_model.head"]),
        ("weights", ["diffusion_model.head.head.weight"]),
        ("dtype", ["manual_cast_dtype"]),
        ("injection", ["tests"]),
        ("hook", ["hook LoRA"]),
        ("compile", ["torch.compile"]),
    ],
)
def test_what_does_not_reach_the_ranks_is_refused_by_name(comfyui, patch, named):
    with pytest.raises(RuntimeError) as refused:
        comfyui.latent(workflow(2, patch=patch, seed=next(SEEDS)))
    assert [name for name in named if name not in str(refused.value)] == []
    require_equal(comfyui, 2)


def test_interrupt_ends_the_workflow_and_keeps_the_ranks(comfyui):
    # The ranks of other loaders end whenever ComfyUI forgets their nodes.
    comfyui.post("/free", {"unload_models": True})
    comfyui.wait_for_ranks(0)
    comfyui.latent(workflow(2, seed=next(SEEDS)))
    processes = comfyui.processes()
    assert len(processes) == 2
    prompt = comfyui.start(workflow(2, steps=5000, seed=next(SEEDS)))
    time.sleep(2)
    comfyui.post("/interrupt", {})
    history = comfyui.wait(prompt)
    assert "execution_interrupted" in [kind for kind, _ in history["status"]["messages"]]
    require_equal(comfyui, 2, lora=0.8)
    assert comfyui.processes() == processes


def test_unload_models_ends_the_ranks_which_start_again(comfyui):
    seed = next(SEEDS)
    comfyui.latent(workflow(2, lora=0.8, seed=seed))
    processes = comfyui.processes()
    assert len(processes) >= 2
    comfyui.post("/free", {"unload_models": True})
    comfyui.wait_for_ranks(0)
    require_equal(comfyui, 2, lora=0.8)
    assert comfyui.ranks() == 2
    assert not processes & comfyui.processes()


def test_the_close_node_ends_the_ranks(comfyui):
    comfyui.post("/free", {"unload_models": True})
    comfyui.wait_for_ranks(0)
    seed = next(SEEDS)
    expected = comfyui.latent(workflow(None, seed=seed))
    assert error(comfyui.latent(workflow(2, seed=seed, close=True)), expected) < 1e-5
    comfyui.wait_for_ranks(0)


def test_previews_and_progress_come_from_each_step(comfyui):
    client, seed = uuid.uuid4().hex, next(SEEDS)

    async def watch():
        url = f"ws://127.0.0.1:{comfyui.port}/ws?clientId={client}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            body = {"prompt": workflow(2, seed=seed, steps=5), "client_id": client}
            await session.post(f"http://127.0.0.1:{comfyui.port}/prompt", json=body)
            steps, previews = [], 0
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    previews += 1
                    continue
                event = json.loads(message.data)
                if event["type"] == "progress":
                    steps.append(event["data"]["value"])
                if event["type"] in ("execution_success", "execution_error"):
                    return event["type"], steps, previews

    outcome, steps, previews = asyncio.run(asyncio.wait_for(watch(), 120))
    assert outcome == "execution_success"
    assert steps[-1] == 5
    assert previews >= 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mesh": "ring 3"}, "'ring 3'"),
        ({"mesh": "round"}, "'round'"),
        ({"mesh": "ring 0 ulysses 2"}, "0 ranks"),
        ({"mesh": "ring 2 ring 2"}, "'ring 2 ring 2'"),
        ({"mesh": "ulysses"}, "'ulysses'"),
        ({"mesh": "batch 2"}, "'batch 2'"),
    ],
)
def test_settings_that_do_not_fit_are_errors(comfyui, settings, named):
    with pytest.raises(RuntimeError) as refused:
        comfyui.latent(workflow(2, seed=next(SEEDS), **settings))
    assert named in str(refused.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_flux_with_a_controlnet_and_reference_images_equals_comfyui_alone(tmp_path, ranks):
    python = os.environ.get("COMFYUI_PYTHON", sys.executable)
    command = [python, "-m", "tests.comfyui.flux", os.environ["COMFYUI"], str(tmp_path), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    results = json.loads(ended.stdout.splitlines()[-1])
    assert "reference images together with a ControlNet" in results.pop("refused")
    assert results["ControlNet"]["changes"] > 0.1
    assert results["reference image"]["changes"] > 1e-3
    assert [name for name, result in results.items() if result["error"] > 1e-5] == []
