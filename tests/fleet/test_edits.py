"""Images in OpenAI's forms, and models that take none."""

import base64
import io
import re

import diffusers
import pytest
from diffusers import FluxControlPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline, FluxPipeline, WanPipeline
from PIL import Image

from para_core.cli.app import run
from para_core.fleet.image_classes import classes_with_images
from para_core.fleet.request import Delivery
from tests.fleet.test_server import ask, image_url, serving

EDITS = "/v1/images/edits"


def url_of(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def reference(url):
    return {"image_url": url}


@pytest.mark.parametrize(
    "fields",
    [
        {"images": [reference(image_url())]},
        {"images": [reference({"url": image_url()})]},
        {"images": [image_url()]},
        {"images": reference(image_url())},
        {"image": reference(image_url())},
        {"image": [reference(image_url())]},
    ],
)
def test_images_are_objects_with_addresses(fields):
    with serving(pipeline=FluxImg2ImgPipeline) as (port, backend):
        assert ask(port, {"prompt": "a", **fields}, path=EDITS)[0] == 200
        (data,) = backend.ran[0][1].images["image"]
        assert Image.open(io.BytesIO(data)).size == (8, 8)


def test_several_images_keep_their_order():
    urls = [image_url(8 + i) for i in range(3)]
    with serving(pipeline=FluxImg2ImgPipeline) as (port, backend):
        assert ask(port, {"prompt": "a", "images": [reference(url) for url in urls]}, path=EDITS)[0] == 200
        sizes = [Image.open(io.BytesIO(data)).size for data in backend.ran[0][1].images["image"]]
    assert sizes == [(8, 8), (9, 8), (10, 8)]


def test_images_are_the_image_of_pipelines_with_another_name():
    with serving(pipeline=FluxControlPipeline) as (port, backend):
        for fields in ({"images": [reference(image_url())]}, {"image": image_url()}, {"control_image": image_url()}):
            assert ask(port, {"prompt": "a", **fields}, path=EDITS)[0] == 200
            assert list(backend.ran[-1][1].images) == ["control_image"]
        body = ask(port, {"prompt": "a", "image": image_url(), "control_image": image_url()}, path=EDITS)[2]
        assert "'image' and field 'control_image'" in body["error"]["message"]


def test_transparent_part_of_a_mask_in_json_is_generated():
    mask = Image.new("RGBA", (8, 8), (9, 9, 9, 255))
    mask.putpixel((0, 0), (9, 9, 9, 0))
    with serving(pipeline=FluxInpaintPipeline) as (port, backend):
        for form in (reference(url_of(mask)), url_of(mask)):
            fields = {"prompt": "a", "images": [reference(image_url())], "mask": form}
            assert ask(port, fields, path=EDITS)[0] == 200
            data = backend.ran[-1][1].images["mask_image"][0]
            pixels = Image.open(io.BytesIO(data)).convert("L")
            assert [pixels.getpixel((x, 0)) for x in range(2)] == [255, 0]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([{"file_id": "file-1"}], "file_id"),
        ([{}], "image_url"),
        ([{"url": "data:"}], "'url'.*image_url"),
        ([{"image_url": 5}], "image_url"),
        ([{"image_url": "file:///etc/passwd"}], "addresses"),
        ([{"image_url": "/etc/passwd"}], "addresses"),
        ([{"image_url": "http://127.0.0.1/a.png"}], "addresses"),
        ([{"image_url": "https://example.com/a.png"}], "addresses"),
        ([{"image_url": "data:image/png;base64,AAAA"}], "readable image"),
        ([reference(image_url())] * 17, "16"),
        ([], "'image'"),
        (5, "'image'"),
        ([[{"image_url": image_url()}]], "'image'"),
    ],
)
@pytest.mark.parametrize("name", ["images", "image"])
def test_other_images_are_refused(name, images, message):
    with serving(pipeline=FluxImg2ImgPipeline) as (port, backend):
        status, _, body = ask(port, {"prompt": "a", name: images}, path=EDITS)
        assert status == 400
        assert re.search(message, body["error"]["message"]), body
        assert not backend.ran


@pytest.mark.parametrize("mask", [{"file_id": "x"}, {"image_url": "/etc/passwd"}, "???", 5])
def test_other_masks_are_refused(mask):
    with serving(pipeline=FluxInpaintPipeline) as (port, _):
        assert ask(port, {"prompt": "a", "image": image_url(), "mask": mask}, path=EDITS)[0] == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (EDITS, {}),
        (EDITS, {"images": [reference(image_url())]}),
        ("/v1/images/generations", {"image": image_url()}),
        ("/v1/images/generations", {"images": [reference(image_url())]}),
        ("/v1/images/generations", {"mask": image_url()}),
    ],
)
def test_model_without_images_names_the_classes_that_take_one(path, fields):
    with serving(pipeline=FluxPipeline) as (port, _):
        status, _, body = ask(port, {"prompt": "a", **fields}, path=path)
        # The route for edits is absent, while the other one takes no image.
        assert status == (404 if path == EDITS else 400)
        assert {"FluxImg2ImgPipeline", "FluxKontextPipeline"} <= set(body["error"]["message"].replace(",", "").split())


def test_video_model_without_images_names_the_class_that_takes_one():
    with serving(pipeline=WanPipeline, delivery=Delivery("mp4")) as (port, _):
        body = ask(port, {"prompt": "a", "input_reference": image_url()}, path="/v1/videos/sync")[2]
        assert "WanImageToVideoPipeline" in body["error"]["message"]


def test_command_names_the_classes_too(capsys, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert run(["generate", "--prompt", "a", "--image", str(tmp_path / "a.png"), "--dry-run"]) != 0
    message = capsys.readouterr().err
    assert "FluxImg2ImgPipeline" in message
    assert "Fill" not in message
    assert "ControlNet" not in message


@pytest.mark.parametrize(
    ("pipeline", "some"),
    [
        ("FluxPipeline", {"FluxImg2ImgPipeline", "FluxKontextPipeline", "FluxInpaintPipeline"}),
        ("QwenImagePipeline", {"QwenImageEditPipeline", "QwenImageImg2ImgPipeline"}),
        ("HunyuanVideoPipeline", {"HunyuanVideoImageToVideoPipeline"}),
        ("StableDiffusionPipeline", {"StableDiffusionImg2ImgPipeline"}),
    ],
)
def test_classes_are_of_the_same_family(pipeline, some):
    classes = classes_with_images(pipeline)
    assert some <= set(classes)
    assert all(hasattr(diffusers, name) and name.startswith(pipeline.removesuffix("Pipeline")) for name in classes)
    assert "StableDiffusionXLImg2ImgPipeline" not in classes


def test_unknown_families_have_no_classes():
    assert classes_with_images("MochiPipeline") == classes_with_images("NoPipeline") == ()
