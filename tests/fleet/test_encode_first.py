"""Prompts that are encoded before the transformer is on the device give the same images as one by one."""

from unittest import mock

import numpy as np
import pytest
from torch import nn

from para_core.fleet.build import build
from para_core.fleet.encode_first import EncodeFirst, encode_batches
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe
from para_core.launcher.errors import RankDied
from tests.weights.pipes import bytes_of

pytestmark = pytest.mark.slow

FLUX = str(find_tiny_flux())
SIZE = {"height": 48, "width": 64, "num_inference_steps": 2}
PROMPTS = ("a red circle", "a green circle", "a blue circle", "a red circle")
LINES = [Line(number, Request({"prompt": text, **SIZE}, seed=number)) for number, text in enumerate(PROMPTS, 1)]


def image(pipe, line):
    return np.asarray(call_pipe(pipe, [line.request]).images[0])


def attached(recipe=Recipe(FLUX), *limits):  # noqa: B008, a frozen value
    encode_first = EncodeFirst(call_pipe, *limits)
    return encode_first, build(recipe, encode_first)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "max_bytes", "sizes", "encoded"),
    [
        ({"cache": 0.1}, 2**32, [4], 3),  # The last prompt equals the first one.
        ({"quantize": "int8"}, 1, [1, 1, 1, 1], 4),
    ],
)
def test_encoding_first_gives_the_images_of_one_by_one(options, max_bytes, sizes, encoded):
    recipe = Recipe(FLUX, **options)
    plain = build(recipe)
    encode_first, pipe = attached(recipe, max_bytes)
    calls, held, batches = [], [], []
    linear = next(x for x in pipe.text_encoder_2.modules() if isinstance(x, nn.Linear))
    linear.register_forward_hook(lambda *_: calls.append(1))
    for batch in encode_batches(LINES, encode_first):
        batches.append(len(batch))
        num_calls = len(calls)
        for line in batch:
            assert np.array_equal(image(pipe, line), image(plain, line)), line.number
            held.append(bytes_of(pipe.text_encoder, pipe.text_encoder_2))
        assert len(calls) == num_calls
    assert (batches, len(calls)) == (sizes, encoded)
    # Each parked parameter has one element.
    assert max(held) < 10_000


def test_a_line_that_cannot_be_encoded_comes_last_and_fails_for_its_reason():
    bad = Line(9, Request({"prompt": "a circle", **SIZE, "prompt_2": 5}, seed=9))
    encode_first, pipe = attached()
    assert list(encode_batches([LINES[0], bad, LINES[1]], encode_first)) == [LINES[:2], [bad]]
    with pytest.raises(ValueError, match="prompt_2"):
        call_pipe(pipe, [bad.request])
    assert image(pipe, LINES[0]).shape == (48, 64, 3)


def test_ranks_that_end_while_they_encode_end_the_batches_and_other_prompts_raise(monkeypatch):
    encode_first, pipe = attached()
    list(encode_batches(LINES[:1], encode_first))
    with pytest.raises(RuntimeError, match="text-encoders replicate"):
        pipe("a yellow circle", **SIZE)
    # The text encoders would run without their weights.
    with pytest.raises(RuntimeError, match="dropped"):
        list(encode_batches(LINES[:1], encode_first))
    encode_first, _ = attached()
    encode = mock.Mock(side_effect=RankDied("rank 1 ended."))
    monkeypatch.setattr(encode_first, "encode", encode)
    with pytest.raises(RankDied, match="rank 1 ended"):
        list(encode_batches(LINES[:2], encode_first))
    assert [call.args[0].number for call in encode.call_args_list] == [1]


@pytest.mark.parametrize("options", [{"text_encoders": "replicate"}, {"offload": "blocks"}])
def test_placed_text_encoders_stay_where_they_are(options):
    encode_first, pipe = attached(Recipe(FLUX, **options))
    before = bytes_of(pipe.text_encoder_2)
    assert list(encode_batches(LINES[:2], encode_first)) == [LINES[:2]]
    assert bytes_of(pipe.text_encoder_2) == before
