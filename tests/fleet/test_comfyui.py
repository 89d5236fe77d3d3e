"""The nodes for ComfyUI, loaded as ComfyUI loads a folder of custom nodes, against the server over a stand-in."""

import http.client
import io
import re
import sys
import types
from unittest import mock

import pytest
import torch
from diffusers import FluxInpaintPipeline, FluxPipeline, WanPipeline
from PIL import Image

from para_core.fleet.outputs import encode
from para_core.fleet.request import Delivery
from tests.comfyui.pack import load_nodes
from tests.fleet.test_server import StandIn, serving, until

COMMON = {"prompt": "a", "width": 64, "height": 32, "steps": 3, "seed": 7}


class Interrupted(Exception):
    """ComfyUI's exception if the user stops a workflow."""


class Painter(StandIn):
    """A replica that answers with red images or frames of the requested size."""

    def outputs(self, request):
        size, frames = (request.fields["width"], request.fields["height"]), request.fields.get("num_frames", 1)
        images = [Image.new("RGB", size, (200, 0 if i < 3 else 40 * i, 0)) for i in range(frames)]
        if "num_frames" in request.fields:
            images = [images]  # of one video
        return tuple(encode(images, request.delivery))


@pytest.fixture
def comfy(monkeypatch):
    """Install the parts of ComfyUI that nodes call; setting ``stop`` interrupts the workflow."""
    state = types.SimpleNamespace(bar=[], stop=False)

    bar = types.SimpleNamespace(update_absolute=lambda value, total: state.bar.append((value, total)))

    def throw():
        if state.stop:
            raise Interrupted

    modules = {
        "comfy": types.ModuleType("comfy"),
        "comfy.utils": types.SimpleNamespace(ProgressBar=lambda total: bar),
        "comfy.model_management": types.SimpleNamespace(throw_exception_if_processing_interrupted=throw),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return state


@pytest.fixture
def nodes(comfy, tmp_path):
    return load_nodes(tmp_path)


@pytest.fixture(scope="module")
def flux():
    """Return port and backend of a server that paints."""
    with serving(Painter(), pipeline=FluxPipeline) as server:
        yield server


def run(node, port, **inputs):
    """Call a node as ComfyUI does: with the defaults of its inputs, by the name of its function. Return its outputs."""
    types_ = node.INPUT_TYPES()
    specs = {**types_["required"], **types_["optional"]}
    assert inputs.keys() <= specs.keys()
    defaults = {name: spec[1]["default"] for name, spec in specs.items() if len(spec) > 1}
    inputs = {**defaults, "server": f" http://127.0.0.1:{port}/\n", **inputs}
    outputs = getattr(node(), node.FUNCTION)(**inputs)
    assert len(outputs) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    return outputs


def test_text_to_image(nodes, comfy, flux, caplog):
    port, backend = flux
    image, seed = run(nodes["ParaCoreTextToImage"], port, **COMMON, guidance_scale=2.0, more='{"prompt_2": "b"}')
    assert (image.shape, image.dtype, seed) == ((1, 32, 64, 3), torch.float32, 7)
    assert torch.equal(image[0, 0, 0], torch.tensor([200, 0, 0]) / 255)
    request = backend.ran[-1][1]
    assert (request.seed, request.fields["guidance_scale"], request.fields["prompt_2"]) == (7, 2.0, "b")
    assert "negative_prompt" not in request.fields
    assert comfy.bar == [(1, 3), (2, 3), (3, 3)]
    run(nodes["ParaCoreTextToImage"], port, **COMMON, negative_prompt="text")
    assert any(record.getMessage().startswith("para_core: negative_prompt") for record in caplog.records)


def test_edit_sends_the_first_image_and_mask(nodes, caplog):
    image, mask = torch.zeros(1, 32, 64, 3), torch.ones(2, 32, 64)
    with serving(Painter(), pipeline=FluxInpaintPipeline) as (port, backend):
        edited, _ = run(nodes["ParaCoreEditImage"], port, **COMMON, image=image, mask=mask, strength=0.5)
        assert edited.shape == (1, 32, 64, 3) and "only the first of 2" in caplog.text
        request = backend.ran[-1][1]
        assert request.fields["strength"] == 0.5
        colors = {name: Image.open(io.BytesIO(files[0])).getpixel((0, 0)) for name, files in request.images.items()}
        assert colors == {"image": (0, 0, 0), "mask_image": (255, 255, 255)}


def test_video_is_frames(nodes):
    with serving(Painter(), pipeline=WanPipeline, delivery=Delivery("webp"), pixels=64 * 32 * 9) as (port, _):
        assert run(nodes["ParaCoreVideo"], port, **COMMON, frames=5)[0].shape == (5, 32, 64, 3)


def test_interrupting_the_workflow_cancels_the_request(nodes, comfy, flux):
    port, backend = flux
    comfy.stop, ran = True, len(backend.ran)
    with pytest.raises(Interrupted):
        run(nodes["ParaCoreTextToImage"], port, **{**COMMON, "prompt": "waits"})
    until(lambda: backend.cancelled)
    assert len(backend.ran) == ran


def test_errors_are_the_servers_sentences(nodes, monkeypatch):
    node = nodes["ParaCoreTextToImage"]
    with serving(Painter(), pipeline=FluxPipeline, api_key="secret") as (port, _):
        with pytest.raises(RuntimeError, match="Authorization"):
            run(node, port, **COMMON)
        monkeypatch.setenv("PARA_CORE_API_KEY", "secret")
        with pytest.raises(RuntimeError, match="9999800001 pixels"):
            run(node, port, **{**COMMON, "width": 99999, "height": 99999})
        with pytest.raises(RuntimeError, match="the pipeline says no"):
            run(node, port, **{**COMMON, "prompt": "refused"})
    with pytest.raises(RuntimeError, match="cannot be reached"):
        run(node, port, **COMMON)
    for cut in (http.client.RemoteDisconnected, http.client.IncompleteRead(b"")):
        monkeypatch.setattr("urllib.request.urlopen", mock.Mock(side_effect=cut))
        with pytest.raises(RuntimeError, match="ended the connection"):
            run(node, port, **COMMON)
    for server in ("file:///etc/passwd", "http://127.0.0.1:80O0", "http://[::1"):
        with pytest.raises(RuntimeError, match=rf"server is '{re.escape(server)}'; expected an address"):
            run(node, port, **COMMON, server=server)


def test_random_seed_is_drawn_by_the_server_and_returned(nodes, flux):
    node, (port, backend) = nodes["ParaCoreTextToImage"], flux
    seeds = [run(node, port, **{**COMMON, "seed": seed})[1] for seed in (-1, -1, 7)]
    assert seeds == [request.seed for _, request in backend.ran[-3:]]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    assert node.INPUT_TYPES()["required"]["seed"][1]["default"] == -1
    # ComfyUI runs a node again if this value changes, which NaN always does.
    unequal = node.IS_CHANGED(**{**COMMON, "seed": -1})
    assert unequal != unequal
    assert node.IS_CHANGED(**COMMON) == node.IS_CHANGED(**COMMON)


def test_more_fields_contradict_no_input(nodes, flux):
    port, backend = flux
    ran = len(backend.ran)
    for more, message in (
        ('{"steps": 5}', "'steps'.*steps"),
        ('{"width": 64}', "'width'.*width and height"),
        ('{"num_inference_steps": 5}', "'steps'.*'num_inference_steps'"),
        ("[1]", "JSON object"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(nodes["ParaCoreTextToImage"], port, **COMMON, more=more)
    assert len(backend.ran) == ran
