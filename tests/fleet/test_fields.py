"""Fields of requests over stand-ins: seeds, images in OpenAI's forms, aliases, and fields without effect."""

import io
import json
import re
import sys

import diffusers
import numpy as np
import pytest
from diffusers import (
    FluxControlPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers.utils import load_image
from PIL import Image

from para_core.cli.app import run
from para_core.fleet.http.bodies import ServerOptions, body_schema
from para_core.fleet.image_classes import classes_with_images
from para_core.fleet.image_files import open_image
from para_core.fleet.no_effect import warnings_of
from para_core.fleet.pipeline_info import describe_class
from para_core.fleet.prompt_file import read_prompts
from para_core.fleet.request import Delivery, make_request
from tests.fleet.test_hostile import form
from tests.fleet.test_server import EDITS, PATH, ask, events_of, image_url

VIDEOS = "/v1/videos/sync"


def as_form(**fields):
    body = form(*[(f'name="{name}"', value) for name, value in fields.items()])
    return {"body": body, "Content_Type": "multipart/form-data; boundary=x"}


def test_classes_that_would_take_an_image_have_the_same_transformer():
    classes = {
        "Kandinsky5T2VPipeline": ("Kandinsky5I2VPipeline",),
        "Kandinsky5T2IPipeline": ("Kandinsky5I2IPipeline",),
        "HunyuanVideoPipeline": ("HunyuanVideoImageToVideoPipeline",),
        "SanaPipeline": (),  # SanaImageToVideoPipeline has another transformer.
    }
    assert {name: classes_with_images(name) for name in classes} == classes


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}])
def test_request_without_a_seed_gets_another_each_time(served, seed):
    port, backend = served(FluxPipeline)
    answers = [ask(port, {"prompt": "a", **seed})[2] for _ in range(5)]
    seeds = [answer["seed"] for answer in answers]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert seeds == [request.seed for _, request in backend.ran[-5:]]
    fixed, _ = served(FluxPipeline, seed=7)
    assert [ask(fixed, {"prompt": "a", **seed})[2]["seed"] for _ in range(2)] == [7, 7]
    # Each of several images has the next seed.
    answer = ask(port, {"prompt": ["a", "b"], "n": 2, "size": "64x64", "seed": 2**63 - 2})[2]
    assert [image["seed"] for image in answer["data"]] == [2**63 - 2, 2**63 - 1, 0, 1]


def test_only_prompts_of_a_form_are_always_texts(served):
    port, backend = served(diffusers.LTX2ImageToVideoPipeline, delivery=Delivery("mp4"))
    texts, numbers = {"prompt": "1", "system_prompt": "2"}, {"prompt_enhancement_seed": 3, "num_frames": 4}
    others = {"seed": "5", "steps": "", "image": image_url(), **dict.fromkeys(("n", "stream", "mask"), "null")}
    assert ask(port, path=VIDEOS, **as_form(**texts, **others, **numbers))[2]["seed"] == 5
    assert backend.ran[-1][1].fields == {**texts, **numbers}


def reference(url):
    return {"image_url": url}


URL = image_url()
THREE = [reference(image_url(Image.new("1", (width, 8)))) for width in (8, 9, 10)]


def mask(mode, hidden, color=1):
    """Return the address of a mask whose first pixel, of the color ``hidden``, is generated."""
    image = Image.new(mode, (8, 8), color)
    image.putpixel((0, 0), hidden)
    if mode != "RGBA":  # The PNG file then has no alpha channel.
        image.info["transparency"] = hidden
    return image_url(image)


MASK = mask("RGBA", (9, 9, 9, 0), (9, 9, 9, 255))
MASKS = [reference(MASK), MASK, mask("P", 0), mask("L", 0), mask("I;16", 0), mask("RGB", (0, 0, 0))]
MASKS.append(mask("RGBA", (255, 255, 255, 255), (0, 0, 0, 255)))  # of diffusers: nothing is transparent


@pytest.mark.parametrize(
    ("pipeline", "fields", "images"),
    [
        (FluxImg2ImgPipeline, {"images": [reference(URL)]}, {"image": [8]}),
        (FluxImg2ImgPipeline, {"images": reference(URL)}, {"image": [8]}),
        (FluxImg2ImgPipeline, {"image": reference(URL)}, {"image": [8]}),
        (FluxImg2ImgPipeline, {"images": THREE}, {"image": [8, 9, 10]}),
        (FluxControlPipeline, {"images": [reference(URL)]}, {"control_image": [8]}),
        (FluxControlPipeline, {"control_image": URL}, {"control_image": [8]}),
        *((FluxInpaintPipeline, {"image": URL, "mask": mask}, {"image": [8], "mask_image": [8]}) for mask in MASKS),
    ],
)
def test_images_are_objects_with_addresses(served, pipeline, fields, images):
    port, backend = served(pipeline)
    assert ask(port, {"prompt": "a", **fields}, path=EDITS)[0] == 200
    sent = backend.ran[-1][1].images
    files = {name: [Image.open(io.BytesIO(data)) for data in each] for name, each in sent.items()}
    assert {name: [image.size[0] for image in each] for name, each in files.items()} == images
    if "mask" in fields:
        pixels = files["mask_image"][0].convert("L")
        assert [pixels.getpixel((x, 0)) for x in range(2)] == [255, 0]


@pytest.mark.parametrize("exif", [{0x0112: 6}, {0x0112: 2}, {}, b"Exif\0\0damaged"])
def test_image_is_turned_upright_as_by_diffusers(exif):
    stored, file = Image.fromarray(np.arange(800, dtype=np.uint8).reshape(20, 40)), io.BytesIO()
    tags = Image.Exif()
    tags.update(exif if isinstance(exif, dict) else {})
    stored.save(file, "PNG", exif=tags if isinstance(exif, dict) else exif)
    expected = load_image(Image.open(file)) if isinstance(exif, dict) else stored.convert("RGB")
    assert np.array_equal(open_image(file.getvalue()), expected)


def test_the_upper_bits_of_a_depth_map_with_16_bits_are_taken(monkeypatch):
    depth, file = np.arange(800, dtype=np.uint16).reshape(20, 40) * 81, io.BytesIO()
    Image.fromarray(depth).save(file, "PNG")
    assert np.array_equal(np.asarray(open_image(file.getvalue()))[..., 0], depth >> 8)
    # An older Pillow opens the file in the mode "I".
    monkeypatch.setattr(Image, "open", lambda *_, **__: Image.fromarray(depth.astype(np.int32)))
    assert np.array_equal(np.asarray(open_image(b""))[..., 0], depth >> 8)


def test_format_without_an_encoder_is_no_choice(monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    fields = body_schema(describe_class("", WanPipeline, {}), ServerOptions()).model_json_schema()["properties"]
    assert fields["output_format"]["anyOf"][0]["enum"] == ["gif", "webp"]


OTHERS = [
    ([{"file_id": "file-1"}], "file_id"),
    ([{"image_url": "file:///etc/passwd"}], "addresses"),
    ([{"image_url": "https://example.com/a.png"}], "addresses"),
    ([{"image_url": "data:image/png;base64,AAAA"}], "readable image"),
    ([reference(URL)] * 17, "16"),
    ([[{"image_url": URL}]], "'image'"),
]
REFUSED = [
    *[(FluxImg2ImgPipeline, EDITS, {name: images}, words) for images, words in OTHERS for name in ("images", "image")],
    *[
        (FluxInpaintPipeline, EDITS, {"image": URL, "mask": mask}, "mask|base64|addresses")
        for mask in ({"file_id": "x"}, {"image_url": "/etc/passwd"}, "???", 5)
    ],
    (FluxControlPipeline, EDITS, {"image": URL, "control_image": URL}, "'image' and field 'control_image'"),
    # A model without images names the classes that take one.
    *[(FluxPipeline, EDITS, fields, "FluxImg2ImgPipeline.*FluxKontext") for fields in ({}, {"images": [URL]})],
    *[(FluxPipeline, PATH, {name: URL}, "FluxImg2ImgPipeline.*FluxKontext") for name in ("image", "images", "mask")],
    (WanPipeline, VIDEOS, {"input_reference": URL}, "WanImageToVideoPipeline"),
    # Two names of one parameter.
    (FluxPipeline, PATH, {"size": "64x64", "width": 32}, "'size'.*'width'|'width'.*'size'"),
    (FluxPipeline, PATH, {"steps": 2, "num_inference_steps": 3}, "'steps'.*'num_inference_steps'"),
    (FluxInpaintPipeline, EDITS, {"mask": URL, "mask_image": URL}, "'mask'.*'mask_image'"),
    (WanImageToVideoPipeline, VIDEOS, {"image": URL, "input_reference": URL}, "'image'.*'input_reference'"),
    (WanImageToVideoPipeline, VIDEOS, {"seconds": 1, "num_frames": 9}, "'seconds'.*'num_frames'"),
    (WanPipeline, VIDEOS, {"seconds": -0.01}, "'seconds' is -0.01; expected a number of at least 0"),
]


@pytest.mark.parametrize(("pipeline", "path", "fields", "words"), REFUSED)
def test_other_images_and_two_names_of_one_parameter_are_refused(served, pipeline, path, fields, words):
    port, backend = served(pipeline, **({"delivery": Delivery("mp4")} if path == VIDEOS else {}))
    ran = len(backend.ran)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    for how in ({"body": {"prompt": "a", **fields}}, as_form(prompt="a", **texts)):
        status, _, body = ask(port, path=path, **how)
        assert status == (404 if (pipeline, path) == (FluxPipeline, EDITS) else 400), body
        assert re.search(words, body["error"]["message"]), body
    assert len(backend.ran) == ran


def test_lines_of_a_prompt_file(tmp_path):
    lines = [{"prompt": "a", "num_inference_steps": 3, "steps": None, "width": 16}]
    deep = {"joint_attention_kwargs": json.loads("[" * 500 + "]" * 500)}  # too deep to be sent to a rank
    lines += [{"prompt": "a", **more} for more in ({"size": "16x32"}, {"guidance_scale": None}, deep)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), '{"prompt": "a", "prompt": "b"}']))
    valid, problems = read_prompts(path, describe_class("", FluxPipeline, {}), {"size": "64x48", "steps": 5})
    words = ("nested", "'prompt' is there twice")
    assert [(each.number, [x in each.reason for x in words]) for each in problems] == [(4, [1, 0]), (5, [0, 1])]
    # A line overrides the options of the command, whichever name they have.
    names = ("width", "height", "num_inference_steps")
    values = [tuple(line.request.fields[name] for name in names) for line in valid]
    assert values == [(16, 48, 3), (16, 32, 5), (64, 48, 5)]
    assert valid[-1].request.fields.keys() == {"prompt", *names}


NEGATIVE = {"negative_prompt": "text"}


@pytest.mark.parametrize(
    ("pipeline", "fields", "named"),
    [
        ("FluxPipeline", NEGATIVE, "true_cfg_scale"),
        ("FluxPipeline", {**NEGATIVE, "true_cfg_scale": 1.5}, None),
        ("FluxPipeline", {"true_cfg_scale": 4.0}, "negative_prompt"),
        ("StableDiffusion3Pipeline", {**NEGATIVE, "guidance_scale": 1.0}, "guidance_scale"),
        ("ZImagePipeline", {**NEGATIVE, "guidance_scale": 0.5}, None),
        ("ZImagePipeline", {**NEGATIVE, "guidance_scale": 0.0}, "guidance_scale"),
        ("LTX2Pipeline", {**NEGATIVE, "guidance_scale": 1.0}, None),
        ("KandinskyV22CombinedPipeline", {**NEGATIVE, "guidance_scale": 1.0}, None),
        ("LTX2Pipeline", {**NEGATIVE, "guidance_scale": 1.0, "audio_guidance_scale": 1.0}, "guidance_scale"),
    ],
)
def test_warning_names_the_scale(pipeline, fields, named):
    model = describe_class("", getattr(diffusers, pipeline), {})
    warnings = warnings_of(make_request({"prompt": "a", **fields}, model), model)
    assert len(warnings) == (named is not None)
    assert named is None or named in warnings[0]


def test_answers_and_the_log_have_the_warning(served, caplog):
    port, _ = served(FluxPipeline)
    assert ask(port, {"prompt": "a"})[2]["warnings"] == []
    (event,) = events_of(ask(port, {"prompt": "a", **NEGATIVE, "stream": True})[2])
    for answer in (ask(port, {"prompt": "a", **NEGATIVE})[2], ask(port, **as_form(prompt="a", **NEGATIVE))[2], event):
        assert ["true_cfg_scale" in warning for warning in answer["warnings"]] == [True]
    assert sum("true_cfg_scale" in record.getMessage() for record in caplog.records) == 3


def test_command_prints_the_warning_once(capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\nc\n")
    command = ["generate", "--negative-prompt", "text", "--dry-run", "--out", str(tmp_path)]
    assert run([*command, "--prompts", str(path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "true_cfg_scale" in line
