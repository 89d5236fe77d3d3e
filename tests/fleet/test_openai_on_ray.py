"""``para_core serve`` with a replica of two ranks, as OpenAI's own client uses it: videos, and edits of images."""

import base64
import contextlib
import io
import time

import numpy as np
import openai
import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from openai.types import ImagesResponse, VideoDeleteResponse
from PIL import Image, ImageDraw

pytest.importorskip("ray", reason="the extra ray is not installed: make test-fleet")

from para_core.fleet.pipeline_info import find_tiny_flux
from tests.fleet.commands import messages, serve
from tests.fleet.test_openai import strict
from tests.modular_folders import plain_modular, save_modular
from tests.scripts import command_on_ranks
from zoo.video import PIPELINE as WAN

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
PORT = 8151
SECONDS = 300
PROMPT = "a red circle moves right"


@contextlib.contextmanager
def served(*arguments):
    """Yield a client of a server over one replica of two ranks. The server must end without an error."""
    with serve("--ranks", 2, "--port", PORT, *arguments, seconds=SECONDS) as command:
        command.read_until(f":{PORT}/")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0) as client:
            yield client
        assert not [text for level, text in messages(command.end()) if level == "ERROR"]


def ended(client, id_):
    deadline = time.monotonic() + SECONDS
    while (video := client.videos.retrieve(id_)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return video


def test_videos_have_the_bytes_of_generate(rank_pool, tmp_path):
    # This size has an odd number of tokens, 27.
    fields = {"frames": 9, "steps": 2, "seed": 5}
    named = [word for name, value in fields.items() for word in (f"--{name}", value)]
    generate = ["generate", "--model", WAN, "--prompt", PROMPT, "--size", "48x48", *named]
    command_on_ranks(rank_pool, *map(str, [*generate, "--out", tmp_path / "generated"]))
    expected = (tmp_path / "generated" / "00001.mp4").read_bytes()

    results = tmp_path / "results"
    with served("--model", WAN, "--out", results) as client:
        started = client.videos.create(prompt=PROMPT, size="48x48", extra_body=fields)
        done = ended(client, started.id)
        assert (done.status, done.progress, done.size) == ("completed", 100, "48x48")
        assert client.videos.download_content(started.id).read() == expected
        other = client.videos.create(prompt=PROMPT, size="48x48", extra_body={**fields, "seed": 6})
        assert ended(client, other.id).status == "completed"
        assert client.videos.download_content(other.id).read() != expected
        assert {video.id for video in client.videos.list()} == {started.id, other.id}
        strict(VideoDeleteResponse, client.videos.delete(started.id))
        assert [video.id for video in client.videos.list()] == [other.id]
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(started.id)
        with pytest.raises(openai.BadRequestError, match="0x48"):
            client.videos.create(prompt=PROMPT, size="0x48")
    assert not list(results.glob(f"{started.id}*"))
    assert len(list(results.glob(f"{other.id}*"))) == 2


def picture(size):
    image = Image.new("RGB", size, "red")
    ImageDraw.Draw(image).ellipse((20, 20, 60, 60), fill="blue")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return image, ("picture.png", buffer.getvalue(), "image/png")


def test_edits_have_the_pixels_of_the_plain_pipeline():
    pipe = FluxImg2ImgPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    # The image has another size than the result, and is no multiple of what the model needs.
    image, file = picture((75, 61))
    call = {"num_inference_steps": 4, "strength": 0.6}
    kwargs = {**call, "height": 64, "width": 96, "max_sequence_length": 64}
    plain = pipe(prompt=PROMPT, image=image, generator=torch.Generator().manual_seed(3), **kwargs).images[0]

    with served("--pipeline", "FluxImg2ImgPipeline") as client:
        fields = {"prompt": PROMPT, "size": "96x64", "extra_body": {**call, "seed": 3, "max_sequence_length": 64}}
        answer = client.images.edit(image=file, **fields)
        strict(ImagesResponse, answer)
        edited = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
        assert edited.size == plain.size
        assert np.abs(np.asarray(edited).astype(int) - np.asarray(plain).astype(int)).max() <= 1
        with pytest.raises(openai.BadRequestError, match="a readable image"):
            client.images.edit(image=("picture.png", b"no image", "image/png"), **fields)
        with pytest.raises(openai.BadRequestError, match="7"):
            client.images.edit(image=file, **{**fields, "extra_body": {"strength": 7}})
        *partials, last = list(client.images.edit(image=file, stream=True, partial_images=1, **fields))
        assert [event.type for event in partials] == ["image_edit.partial_image"]
        assert last.b64_json == answer.data[0].b64_json


@pytest.mark.parametrize(("name", "guided"), [("flux", {}), ("qwen-image", {"guidance_scale": 2.5})])
def test_modular_folder_gives_the_pixels_of_the_plain_pipeline(tmp_path, name, guided):
    folder = save_modular(name, str(tmp_path / "model"))
    # An image has 3 × 4 tokens on two ranks.
    call = {"prompt": PROMPT, "height": 48, "width": 64, "num_inference_steps": 2}
    plain = plain_modular(folder, "images", seed=3, guidance=guided.get("guidance_scale"), **call)[0]
    with served("--model", folder) as client:
        fields = {"steps": 2, "seed": 3, **guided}
        answer = client.images.generate(prompt=PROMPT, size="64x48", extra_body=fields)
        strict(ImagesResponse, answer)
        image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
        assert np.abs(np.asarray(image).astype(int) - np.asarray(plain).astype(int)).max() <= 1
        with pytest.raises(openai.BadRequestError, match="latents"):
            client.images.generate(prompt=PROMPT, size="64x48", extra_body={"latents": [1.0]})
