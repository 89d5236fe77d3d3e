"""Seeds of requests: drawn, fixed by the server, sent by the client, and returned with every result."""

import io
import json

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline, WanPipeline
from PIL import Image

from para_core.fleet.build import build, find_model
from para_core.fleet.outputs import Output, Result
from para_core.fleet.pipeline_info import describe, find_tiny_flux
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, make_request
from para_core.fleet.work import Watch, generate
from tests.fleet.test_hostile import form
from tests.fleet.test_server import StandIn, ask, image_url, serving

EDITS = "/v1/images/edits"


class Several(StandIn):
    """Answers with as many files as the request asks for."""

    async def generate(self, id_, request, progress):
        await super().generate(id_, request, progress)
        return Result(tuple(Output(f"-{i}.png", b"") for i in range(request.results)), {})


def as_form(**fields):
    body = form(*[(f'name="{name}"', value) for name, value in fields.items()])
    return {"body": body, "Content_Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}])
def test_request_without_a_seed_gets_another_each_time(seed):
    with serving(pipeline=FluxPipeline) as (port, backend):
        answers = [ask(port, {"prompt": "a", **seed})[2] for _ in range(5)]
    seeds = [answer["seed"] for answer in answers]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert seeds == [request.seed for _, request in backend.ran]
    assert seeds == [answer["data"][0]["seed"] for answer in answers]


def test_drawn_seed_that_is_sent_back_gives_the_same_bytes():
    with serving(pipeline=FluxPipeline) as (port, _):
        first = ask(port, {"prompt": "a"})[2]
        assert ask(port, {"prompt": "a", "seed": first["seed"]})[2]["data"] == first["data"]


@pytest.mark.parametrize("seed", [{}, {"seed": None}, {"seed": -1}])
def test_seed_of_the_server_is_that_of_every_request_without_one(seed):
    with serving(pipeline=FluxPipeline, seed=7) as (port, _):
        assert [ask(port, {"prompt": "a", **seed})[2]["seed"] for _ in range(2)] == [7, 7]
        assert ask(port, {"prompt": "a", "seed": 8})[2]["seed"] == 8


def test_each_of_several_images_has_the_next_seed():
    with serving(Several(), pipeline=FluxPipeline) as (port, _):
        answer = ask(port, {"prompt": ["a", "b"], "n": 2, "size": "64x64", "seed": 2**63 - 2})[2]
    assert [image["seed"] for image in answer["data"]] == [2**63 - 2, 2**63 - 1, 0, 1]


@pytest.mark.parametrize(("text", "seed"), [("5", 5), ("-1", None), ("null", None), ("", None)])
def test_seeds_of_forms_and_edits(text, seed):
    with serving(pipeline=FluxImg2ImgPipeline) as (port, _):
        answers = [ask(port, path=EDITS, **as_form(prompt="a", seed=text, image=image_url()))[2] for _ in range(2)]
    seeds = {answer["seed"] for answer in answers}
    assert seeds == {seed} if seed is not None else len(seeds) == 2


@pytest.mark.parametrize("seed", [-2, 2**63, 1.0, "7", True])
def test_other_seeds_are_refused(seed):
    with serving(pipeline=FluxPipeline) as (port, backend):
        status, _, body = ask(port, {"prompt": "a", "seed": seed})
        assert (status, "'seed'" in body["error"]["message"]) == (400, True)
        assert not backend.ran


def test_video_has_its_seed_in_its_record_and_in_its_events(tmp_path):
    options = {"pipeline": WanPipeline, "delivery": Delivery("mp4"), "videos": tmp_path, "pixels": 64 * 32 * 9}
    fields = {"prompt": "a", "size": "64x32", "frames": 9}
    with serving(**options) as (port, backend):
        records = [ask(port, fields, path="/v1/videos")[2] for _ in range(2)]
        _, _, stream = ask(port, {**fields, "stream": True}, path="/v1/videos/sync")
        shown = [ask(port, None, method="GET", path=f"/v1/videos/{record['id']}")[2] for record in records]
    event = json.loads(stream.decode().split("data: ")[1])
    seeds = [record["seed"] for record in records] + [event["seed"]]
    assert len(set(seeds)) == 3
    assert seeds == [request.seed for _, request in backend.ran]
    assert [record["seed"] for record in shown] == seeds[:2]


def test_images_of_one_request_are_those_of_their_own_seeds():
    model = find_model(None)
    recipe = Recipe(model.name)
    pipe = build(recipe)
    fields = {"prompt": "a large red circle", "size": "64x48", "steps": 2}
    together = generate(pipe, make_request({**fields, "n": 2, "seed": 3}, model), recipe)
    assert together.metadata["seeds"] == [3, 4]
    for output, seed in zip(together.outputs, (3, 4), strict=True):
        alone = generate(pipe, make_request({**fields, "seed": seed}, model), recipe)
        assert difference(output.data, alone.outputs[0].data) <= 1
    other = generate(pipe, make_request({**fields, "seed": 5}, model), recipe)
    assert difference(together.outputs[0].data, other.outputs[0].data) > 1


def test_edits_of_one_request_are_those_of_their_own_seeds():
    pipe = FluxImg2ImgPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    model, recipe = describe("", FluxImg2ImgPipeline, {}), Recipe("")
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(buffer, "PNG")
    fields = {"prompt": "a", "image": "a.png", "size": "64x48", "steps": 4, "max_sequence_length": 16, "strength": 0.5}

    def edit(**others):
        request = make_request({**fields, **others}, model, read_image=lambda _: buffer.getvalue())
        steps = []
        return generate(pipe, request, recipe, Watch(progress=steps.append)), steps

    together, steps = edit(n=2, seed=3)
    # With this strength two of four steps are done, for each image.
    assert steps == [1, 2, 3, 4]
    assert [output.suffix for output in together.outputs] == ["-0.png", "-1.png"]
    assert [output.data for output in together.outputs] == [edit(seed=seed)[0].outputs[0].data for seed in (3, 4)]


def difference(first, second):
    pixels = [torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).int() for data in (first, second)]
    return int((pixels[0] - pixels[1]).abs().max())
