"""Prompts that are encoded before the transformer is on the device give the same images as one by one."""

from unittest import mock

import numpy as np
import pytest
from torch import nn

from para_core.fleet.build import build
from para_core.fleet.encode_first import EncodeFirst, _Weights, encode_batches
from para_core.fleet.lines import LineRun
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.prompt_file import Line, Problem
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
    calls, batches = [], []
    linear = next(x for x in pipe.text_encoder_2.modules() if isinstance(x, nn.Linear))
    linear.register_forward_hook(lambda *_: calls.append(1))
    for batch in encode_batches(LINES, encode_first, fail=None):
        batches.append(len(batch))
        for line in batch:
            assert np.array_equal(image(pipe, line), image(plain, line)), line.number
            assert bytes_of(pipe.text_encoder, pipe.text_encoder_2) < 10_000  # Each parameter has one element.
    assert (batches, len(calls)) == (sizes, encoded)


def test_a_line_that_cannot_be_encoded_fails_for_its_reason_and_leaves_no_outputs():
    encode_first, pipe = attached()
    failing, failed = mock.Mock(side_effect=[ValueError("too long"), None]), []
    pipe.text_encoder_2.register_forward_pre_hook(lambda *_: failing())  # after text_encoder's output is stored
    batches = encode_batches(LINES[:2], encode_first, lambda *problem: failed.append(problem))
    assert [(batch, len(encode_first._encoded._outputs)) for batch in batches] == [(LINES[1:2], 2)]
    assert [(line, str(error)) for line, error in failed] == [(LINES[0], "too long")]


def test_weights_that_were_restored_in_part_are_parked_and_restored_again():
    module = nn.Linear(3, 2)
    expected, weights, cpu = module.weight.detach().clone(), _Weights([module]), module.weight.device
    weights.park(cpu, keep=True)
    with mock.patch("torch.Tensor.to", side_effect=[expected, MemoryError]), pytest.raises(MemoryError):
        weights.restore(cpu)
    weights.park(cpu, keep=True)
    assert bytes_of(module) == 8  # two parameters, of which each has one element
    weights.restore(cpu)
    assert module.weight.equal(expected)


def test_prompts_after_the_text_encoders_were_dropped_raise():
    encode_first, pipe = attached()
    list(encode_batches(LINES[:1], encode_first, fail=None))
    with pytest.raises(RuntimeError, match="text-encoders replicate"):
        pipe("a yellow circle", **SIZE)
    # The text encoders would run without their weights.
    with pytest.raises(RuntimeError, match="dropped"):
        list(encode_batches(LINES[:1], encode_first, fail=None))


@pytest.mark.parametrize("method", ["encode", "generate"])
def test_line_with_which_ranks_end_fails_and_new_ranks_generate_the_others(method):
    def call(name, *args, listener=None):
        if name == method and args[0] in (LINES[1], LINES[1].request):
            raise RankDied("rank 1 ended.")
        return name != "encodes_first" or method == "encode"

    ranks, written = mock.Mock(call=call, restarts=True), []
    problems = LineRun(ranks, LINES, lambda line, _: written.append(line), mock.Mock()).run()
    assert (problems, written) == ([Problem(2, "rank 1 ended.")], [LINES[0], *LINES[2:]])
    assert ranks.start.call_count == 2
    ranks.restarts = False
    with pytest.raises(RankDied, match="rank 1 ended"):
        LineRun(ranks, LINES, lambda *_: None, mock.Mock()).run()


@pytest.mark.parametrize("options", [{"text_encoders": "replicate"}, {"offload": "blocks"}])
def test_placed_text_encoders_have_no_phases(options):
    assert not attached(Recipe(FLUX, **options))[0].encodes_first()
