"""Lines of a prompts file that fail on all ranks of torchrun, and lines that run after these."""

from functools import partial
from unittest import mock

import torch

import para_core.fleet.rank
from para_core.fleet.build import build, find_model
from para_core.fleet.engine import OwnRank
from para_core.fleet.lines import LineRun
from para_core.fleet.outputs import write_result
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions, load_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request


def run_lines(recipe, lines, folder, build):
    """Generate lines as each rank of torchrun does. Return events, and numbers of failed lines."""
    folder.mkdir(exist_ok=True)
    events = []
    shown = mock.Mock(begin=lambda number, steps: events.append(("begin", number)))

    def write(line, result):
        write_result(folder, line, result)
        events.append(("done", line.number))

    with mock.patch.object(para_core.fleet.rank, "build", build):
        ranks = OwnRank(partial(load_rank, recipe, ReplicaOptions(), encode_first=len(lines) > 1))
        problems = LineRun(ranks, lines, write, shown).run()
    return events, [problem.number for problem in problems]


def run_out_of_memory_at(module, numbers):
    """Let these calls of a module raise on this rank."""
    calls = []

    def fail(module, args, kwargs):
        calls.append(0)
        if len(calls) in numbers:
            raise torch.OutOfMemoryError("there is no memory left")

    module.register_forward_pre_hook(fail, with_kwargs=True)


def encode_lines(folder):
    """Encode three lines as each rank of torchrun does. The second one cannot be encoded."""

    def build_without_memory(recipe, encode_first):
        pipe = build(recipe, encode_first)
        # It fails again when the line runs after all others.
        run_out_of_memory_at(pipe.text_encoder_2, (2, 4))
        return pipe

    prompts, model = ("a large red circle", "a blue square", "a small green ring"), find_model(None)
    requests = [make_request({"prompt": prompt, "size": "64x48", "steps": 1}, model, seed=3) for prompt in prompts]
    lines = tuple(Line(number, request, name=f"{number:05d}") for number, request in enumerate(requests, 1))
    return run_lines(Recipe(str(find_tiny_flux()), timeout=20), lines, folder, build_without_memory)


def test_a_line_that_no_rank_can_encode_fails_after_the_others(rank_pool, tmp_path):
    first, second = rank_pool.run(encode_lines, 2, tmp_path)
    done = [("begin", 1), ("done", 1), ("begin", 3), ("done", 3)]
    assert first == ([*done, ("begin", 2)], [2])
    assert second[1] == [2]
