"""Prompts that are encoded before the transformer is on the device give the same images as one by one."""

import json

import numpy as np
import pytest
from torch import nn

from para_core.cli.app import run
from para_core.fleet.build import build
from para_core.fleet.encode_first import EncodeFirst, encode_batches
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe
from para_core.launcher.errors import RankDied
from tests.cli.test_generate import CAPTION, SMALL, TINY_FLUX, pixels, plain_pixels

pytestmark = pytest.mark.slow

SIZE = {"height": 48, "width": 64, "num_inference_steps": 2}
COLOURS = ("red", "green", "blue", "red")


def lines_of(prompts):
    return [Line(number, Request({"prompt": text, **SIZE}, seed=number)) for number, text in enumerate(prompts, 1)]


def image(pipe, line):
    return np.asarray(call_pipe(pipe, [line.request]).images[0])


def memory_of(*modules):
    tensors = [x for module in modules for x in module.parameters()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def generate(recipe, lines, max_bytes=2**32):
    encode_first = EncodeFirst(call_pipe, max_bytes)
    pipe = build(recipe, encode_first)
    calls, held, images, sizes = [], [], {}, []
    next(x for x in pipe.text_encoder_2.modules() if isinstance(x, nn.Linear)).register_forward_hook(
        lambda *_: calls.append(1)
    )
    for batch in encode_batches(lines, encode_first):
        sizes.append(len(batch))
        num_calls = len(calls)
        for line in batch:
            images[line.number] = image(pipe, line)
            held.append(memory_of(pipe.text_encoder, pipe.text_encoder_2))
        assert len(calls) == num_calls
    return images, sizes, held, calls


def expected_images(recipe, lines):
    pipe = build(recipe)
    return {line.number: image(pipe, line) for line in lines}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(str(TINY_FLUX)),
        Recipe(str(TINY_FLUX), cache=0.1),
        Recipe(str(TINY_FLUX), quantize="int8"),
        pytest.param(Recipe(str(TINY_FLUX), compile="whole"), marks=pytest.mark.long),
        pytest.param(Recipe(str(TINY_FLUX), compile="blocks"), marks=pytest.mark.long),
    ],
    ids=["plain", "cache", "int8", "whole", "blocks"],
)
def test_encoding_first_gives_the_images_of_one_by_one(recipe):
    lines = lines_of([f"a {colour} circle" for colour in COLOURS])
    expected = expected_images(recipe, lines)
    images, sizes, held, calls = generate(recipe, lines)
    assert sizes == [4]
    # The last prompt equals the first one.
    assert len(calls) == 3
    assert all(np.array_equal(images[number], out) for number, out in expected.items())
    # Each parked parameter has one element.
    assert max(held) < 10_000


def test_batches_are_bounded_in_bytes_and_weights_come_back():
    lines = lines_of([f"a {colour} square" for colour in COLOURS])
    expected = expected_images(Recipe(str(TINY_FLUX)), lines)
    images, sizes, held, calls = generate(Recipe(str(TINY_FLUX)), lines, max_bytes=1)
    assert sizes == [1, 1, 1, 1]
    assert len(calls) == 4
    assert all(np.array_equal(images[number], out) for number, out in expected.items())
    assert max(held) < 10_000


def test_a_line_that_cannot_be_encoded_comes_last_and_fails_for_its_reason():
    bad = Line(9, Request({"prompt": "a circle", "height": 48, "width": 64, "prompt_2": 5}, seed=9))
    first, last = lines_of(["a red circle", "a blue circle"])
    encode_first = EncodeFirst(call_pipe)
    pipe = build(Recipe(str(TINY_FLUX)), encode_first)
    batches = list(encode_batches([first, bad, last], encode_first))
    assert batches == [[first, last], [bad]]
    with pytest.raises(ValueError, match="prompt_2"):
        call_pipe(pipe, [bad.request])
    assert image(pipe, first).shape == (48, 64, 3)


def test_ranks_that_end_while_they_encode_end_the_batches(monkeypatch):
    encode_first, numbers = EncodeFirst(call_pipe), []
    build(Recipe(str(TINY_FLUX)), encode_first)

    def encode(line):
        numbers.append(line.number)
        raise RankDied("rank 1 ended.")

    monkeypatch.setattr(encode_first, "encode", encode)
    with pytest.raises(RankDied, match="rank 1 ended"):
        list(encode_batches(lines_of(["a red circle", "a blue circle"]), encode_first))
    assert numbers == [1]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(str(TINY_FLUX), text_encoders="replicate"),
        Recipe(str(TINY_FLUX), offload="blocks"),
        Recipe(str(TINY_FLUX), text_encoders="offload"),
    ],
)
def test_placed_text_encoders_stay_where_they_are(recipe):
    encode_first = EncodeFirst(call_pipe)
    pipe = build(recipe, encode_first)
    before = memory_of(pipe.text_encoder_2)
    lines = lines_of(["a red circle", "a blue circle"])
    assert list(encode_batches(lines, encode_first)) == [lines]
    assert memory_of(pipe.text_encoder_2) == before


def test_a_prompt_that_was_not_encoded_is_an_error():
    encode_first = EncodeFirst(call_pipe)
    pipe = build(Recipe(str(TINY_FLUX)), encode_first)
    list(encode_batches(lines_of(["a red circle"]), encode_first))
    with pytest.raises(RuntimeError, match="text-encoders replicate"):
        pipe("a green circle", **SIZE)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_file_of_prompts_gives_the_images_of_plain_pipeline(tmp_path, ranks):
    path = tmp_path / "prompts.jsonl"
    texts = [f"{CAPTION}, {colour}" for colour in COLOURS]
    path.write_text("\n".join(json.dumps({"prompt": text, "seed": 3}) for text in texts))
    # The default run starts ranks by the command here only; elsewhere ranks of the pool run it.
    out = ["--prompts", str(path), "--out", str(tmp_path / "all")]
    assert run(["generate", "--ranks", str(ranks), *SMALL, *out]) == 0
    images = [pixels(tmp_path / f"all/{number:05d}.png") for number in range(1, len(texts) + 1)]
    assert np.array_equal(images[0], images[3])
    for text, image in zip(texts[:2], images, strict=False):
        difference = np.abs(image - plain_pixels(prompt=text, seed=3))
        assert difference.max() <= (ranks > 1)
