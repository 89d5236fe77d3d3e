"""The server as OpenAI's own client uses it, over replicas that are stand-ins."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import openai
import pytest
from diffusers import FluxImg2ImgPipeline, FluxInpaintPipeline, FluxKontextPipeline, FluxPipeline
from openai.types import Image as OpenAIImage
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent, ImagesResponse, Model
from PIL import Image

from para_core.fleet.outputs import Output
from tests.fleet.test_server import StandIn, serving, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Previewer(StandIn):
    """A replica that sends as many partial images as the request wants."""

    async def generate(self, id_, request, progress):
        for index in range(request.delivery.partial_images):
            progress(Output(".png", b"partial %d" % index))
        return await super().generate(id_, request, progress)


def strict(model, value):
    """Validate an answer by the client's own type, which the client itself does not do."""
    model.model_validate(value.to_dict(), strict=False)


def picture(mode="RGB", color="red", size=(16, 8)):
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return ("picture.png", buffer.getvalue(), "image/png")


def test_images_generate(client):
    with serving(pipeline=FluxPipeline, seed=0) as (port, backend):
        answer = client(port).images.generate(
            model="any", prompt="a", size="64x32", n=1, output_format="jpeg", output_compression=40, quality="high"
        )
        strict(ImagesResponse, answer)
        strict(OpenAIImage, answer.data[0])
        assert base64.b64decode(answer.data[0].b64_json) == b"a 0"
        assert answer.output_format == "jpeg"
        delivery = backend.ran[0][1].delivery
        assert (delivery.format_, delivery.quality) == ("jpg", 40)
        url = client(port).images.generate(prompt="a", response_format="url").data[0].url
        assert url.startswith(f"http://127.0.0.1:{port}/v1/files/")


def test_images_generate_stream(client):
    with serving(Previewer(), pipeline=FluxPipeline, seed=0) as (port, _):
        stream = client(port).images.generate(prompt="a", size="64x32", stream=True, partial_images=2)
        *partials, last = list(stream)
        assert [event.partial_image_index for event in partials] == [0, 1]
        for event in partials:
            strict(ImageGenPartialImageEvent, event)
        strict(ImageGenCompletedEvent, last)
        assert (last.type, last.size) == ("image_generation.completed", "64x32")
        assert base64.b64decode(last.b64_json) == b"a 0"


def test_stream_that_fails_raises_in_the_client(client):
    with serving(pipeline=FluxPipeline) as (port, _):
        stream = client(port).images.generate(prompt="refused", stream=True)
        with pytest.raises(openai.APIError, match="the pipeline says no"):
            list(stream)


def test_images_edit_with_files(client):
    with serving(pipeline=FluxImg2ImgPipeline) as (port, backend):
        answer = client(port).images.edit(image=[picture(), picture(color="blue")], prompt="a", n=1, size="64x32")
        strict(ImagesResponse, answer)
        request = backend.ran[0][1]
        assert len(request.images["image"]) == 2
        assert (request.fields["width"], request.fields["num_images_per_prompt"]) == (64, 1)
        events = list(client(port).images.edit(image=picture(), prompt="a", stream=True))
        assert [event.type for event in events] == ["image_edit.completed"]
        with pytest.raises(openai.BadRequestError, match="needs an image"):
            client(port).images.edit(image=[], prompt="a")


def test_transparent_part_of_a_mask_is_generated(client):
    with serving(pipeline=FluxInpaintPipeline) as (port, backend):
        mask = picture("RGBA", (0, 0, 0, 0))
        client(port).images.edit(image=picture(), mask=mask, prompt="a")
        data = backend.ran[0][1].images["mask_image"][0]
        assert Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_route_that_a_class_cannot_serve_is_absent_and_names_classes_that_can(client):
    with serving(pipeline=FluxPipeline, others=("FluxImg2ImgPipeline",)) as (port, _):
        with pytest.raises(openai.NotFoundError, match=r"/v1/images/edits .*FluxImg2ImgPipeline"):
            client(port).images.edit(image=picture(), prompt="a")
        assert client(port).images.generate(prompt="a").data
    with serving(pipeline=FluxImg2ImgPipeline, others=("FluxPipeline",)) as (port, _):
        with pytest.raises(openai.NotFoundError, match=r"/v1/images/generations .*FluxPipeline"):
            client(port).images.generate(prompt="a")
        assert client(port).images.edit(image=picture(), prompt="a").data


@pytest.mark.parametrize(
    ("pipeline", "served"),
    [
        (FluxPipeline, {"generations"}),
        (FluxImg2ImgPipeline, {"edits"}),
        (FluxInpaintPipeline, {"edits"}),
        (FluxKontextPipeline, {"generations", "edits"}),
    ],
)
def test_documented_routes_are_those_that_the_class_serves(pipeline, served):
    with serving(pipeline=pipeline) as (port, _), urlopen(f"http://127.0.0.1:{port}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    assert {path.removeprefix("/v1/images/") for path in paths if path.startswith("/v1/images/")} - {
        "generations/{request_id}",
        "edits/{request_id}",
    } == served


def test_models(client):
    with serving() as (port, _):
        models = client(port).models.list().data
        strict(Model, models[0])
        assert client(port).models.retrieve(models[0].id).id == models[0].id
        with pytest.raises(openai.NotFoundError):
            client(port).models.retrieve("sora/2")


def test_key(client):
    with serving(api_key="secret") as (port, _):
        assert len(client(port, "secret").models.list().data) == 1
        with pytest.raises(openai.AuthenticationError):
            client(port, "wrong").models.list()


def test_busy_server_raises_the_rate_limit_error(client):
    with serving(StandIn(1.0), waiting=0) as (port, backend), ThreadPoolExecutor(1) as threads:
        first = threads.submit(client(port).images.generate, prompt="a")
        until(lambda: backend.began)
        with pytest.raises(openai.RateLimitError) as refusal:
            client(port).images.generate(prompt="b")
        assert refusal.value.type == "rate_limit_error"
        first.result()
