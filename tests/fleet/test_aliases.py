"""Fields that set the same parameter of a pipeline, in JSON, forms, prompt files and on the command line."""

import json

import pytest
from diffusers import FluxInpaintPipeline, FluxPipeline, HunyuanVideoPipeline, WanImageToVideoPipeline

from para_core.cli.app import run
from para_core.fleet.pipeline_info import describe
from para_core.fleet.prompt_file import read_prompts
from para_core.fleet.request import Delivery
from tests.fleet.test_seeds import as_form
from tests.fleet.test_server import ask, image_url, serving

IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos/sync"
PAIRS = [
    (FluxPipeline, {"size": "64x64", "width": 32}),
    (FluxPipeline, {"size": "64x64", "height": 64}),
    (FluxPipeline, {"steps": 2, "num_inference_steps": 3}),
    (FluxPipeline, {"n": 1, "num_images_per_prompt": 2}),
    (FluxInpaintPipeline, {"mask": image_url(), "mask_image": image_url()}),
    (FluxInpaintPipeline, {"image": image_url(), "images": [{"image_url": image_url()}]}),
    (WanImageToVideoPipeline, {"image": image_url(), "input_reference": image_url()}),
    (WanImageToVideoPipeline, {"frames": 5, "num_frames": 9}),
    (WanImageToVideoPipeline, {"seconds": "1", "frames": 9}),
    (WanImageToVideoPipeline, {"seconds": 1, "num_frames": 9}),
    (HunyuanVideoPipeline, {"n": 1, "num_videos_per_prompt": 2}),
]


def served(pipeline):
    paths = {FluxPipeline: IMAGES, FluxInpaintPipeline: "/v1/images/edits"}
    path = paths.get(pipeline, VIDEOS)
    options = {"delivery": Delivery("mp4")} if path == VIDEOS else {}
    return serving(pipeline=pipeline, **options), path


@pytest.mark.parametrize(("pipeline", "fields"), PAIRS)
def test_two_names_of_one_parameter_are_refused(pipeline, fields):
    server, path = served(pipeline)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    with server as (port, backend):
        for answer in (
            ask(port, {"prompt": "a", **fields}, path=path),
            ask(port, path=path, **as_form(prompt="a", **texts)),
        ):
            assert answer[0] == 400
            assert all(repr(name) in answer[2]["error"]["message"] for name in fields), answer
        assert not backend.ran


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "auto", "width": 32, "height": 32},
        {"size": None, "width": 32},
        {"steps": None, "num_inference_steps": 3},
        {"n": 1, "num_images_per_prompt": None},
    ],
)
def test_name_without_a_value_contradicts_nothing(fields):
    with serving(pipeline=FluxPipeline) as (port, _):
        assert ask(port, {"prompt": "a", **fields})[0] == 200


def test_lines_of_a_prompt_file(tmp_path):
    model = describe("", FluxPipeline, {})
    lines = [
        {"prompt": "a", "steps": 2, "num_inference_steps": 3},
        {"prompt": "a", "num_inference_steps": 3, "width": 16},
        {"prompt": "a", "size": "16x32"},
        {"prompt": "a"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    valid, problems = read_prompts(path, model, {"size": "64x48", "steps": 5})
    assert [problem.number for problem in problems] == [1]
    assert "'steps'" in problems[0].reason
    assert "'num_inference_steps'" in problems[0].reason
    # A line overrides the options of the command, whichever name they have.
    names = ("width", "height", "num_inference_steps")
    values = [tuple(line.request.fields[name] for name in names) for line in valid]
    assert values == [(16, 48, 3), (16, 32, 5), (64, 48, 5)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "2", "--set", "num_inference_steps=3"], ("--steps", "--set num_inference_steps")),
        (["--size", "64x64", "--set", "width=32"], ("--size", "--set height or width")),
        (["--set", "n=1", "--set", "num_images_per_prompt=1"], ("--set n", "--set num_images_per_prompt")),
        (["--set", "size=64x64", "--set", "width=32"], ("--set size", "--set width")),
        (["--guidance", "2", "--set", "guidance_scale=3"], ("--set guidance_scale",)),
        (["--seed", "2", "--set", "seed=3"], ("--set seed",)),
    ],
)
def test_options_of_the_command(capsys, options, named):
    assert run(["generate", "--prompt", "a", "--dry-run", *options]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in named), error
