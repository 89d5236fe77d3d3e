"""Lines of a prompts file that fail on some or all ranks, and lines that run after these on the same ranks."""

from datetime import timedelta
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from PIL import Image

import para_core.fleet.engine
import para_core.fleet.rank
from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe
from para_core.fleet.build import build, find_model
from para_core.fleet.engine import OwnRank
from para_core.fleet.lines import LineRun
from para_core.fleet.outputs import write_result
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.prompt_file import Line
from para_core.fleet.rank import ReplicaOptions, load_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request

STEPS = 9


class Events:
    """Recorder of the events of lines, in order."""

    def __init__(self):
        self.events = []

    def begin(self, number, steps):
        self.events.append(("begin", number))

    def step(self, done):
        pass

    def end(self):
        pass


def run_lines(recipe, lines, folder, build):
    """Generate the lines as each rank of torchrun does. Return the events and the numbers of lines that failed, or the
    name of this rank's error in their place.
    """
    shown, several = Events(), len(lines) > 1

    def write(line, result):
        write_result(folder, line, result)
        shown.events.append(("done", line.number))

    with (
        mock.patch.object(para_core.fleet.rank, "build", build),
        mock.patch.object(para_core.fleet.engine, "_AGREEMENT", timedelta(seconds=5)),
    ):
        ranks = OwnRank(partial(load_rank, recipe, ReplicaOptions(), encode_first=several))
        try:
            problems = LineRun(ranks, lines, write, shown).run()
        except Exception as error:
            return shown.events, f"{type(error).__name__}: {error}"
    return shown.events, [problem.number for problem in problems]


def generate_lines(folder, num_stages, pipefusion, failing):
    """Generate two lines as each rank of torchrun does. The first one ends by an exception on all ranks at call
    ``failing`` of its transformer.
    """
    folder.mkdir(exist_ok=True)
    pipe = DiffusionPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=num_stages) if num_stages > 1 else None
    if pipefusion or num_stages > 1:
        parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion(2) if pipefusion else None, timeout=20)
    calls = []

    def run_out_of_memory(module, args, kwargs):
        calls.append(0)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("there is no memory left")

    pipe.transformer.register_forward_pre_hook(run_out_of_memory, with_kwargs=True)
    model = find_model(None)
    request = make_request({"prompt": "a large red circle", "size": "64x48", "steps": STEPS}, model, seed=3)
    lines = tuple(Line(number, request, name=f"{number:05d}") for number in ((1, 2) if failing else (2,)))
    return run_lines(Recipe(str(find_tiny_flux())), lines, folder, lambda recipe, encode_first: pipe)


@pytest.mark.parametrize(("pipefusion", "failing"), [(True, 5), pytest.param(False, 3, marks=pytest.mark.long)])
def test_line_after_a_failed_one_is_exact(rank_pool, tmp_path, pipefusion, failing):
    generate_lines(tmp_path / "alone", 1, pipefusion, None)
    first, second = rank_pool.run(generate_lines, 2, tmp_path / "stages", 2, pipefusion, failing)
    assert first == ([("begin", 1), ("begin", 2), ("done", 2)], [1])
    assert second == ([("begin", 1), ("begin", 2)], [1])
    images = [np.asarray(Image.open(tmp_path / name / "00002.png")).astype(int) for name in ("alone", "stages")]
    assert np.array_equal(*images)


def encode_lines(folder, failing):
    """Encode three lines as each rank of torchrun does. On the ranks ``failing`` the second one cannot be encoded."""

    def build_without_memory(recipe, encode_first):
        pipe, calls = build(recipe, encode_first), []

        def run_out_of_memory(module, args, kwargs):
            calls.append(0)
            # It fails again when the line runs after all others.
            if dist.get_rank() in failing and len(calls) in (2, 4):
                raise torch.OutOfMemoryError("there is no memory left")

        pipe.text_encoder_2.register_forward_pre_hook(run_out_of_memory, with_kwargs=True)
        return pipe

    model = find_model(None)
    options = {"size": "64x48", "steps": 1}
    prompts = ("a large red circle", "a blue square", "a small green ring")
    requests = [make_request({"prompt": prompt, **options}, model, seed=3) for prompt in prompts]
    lines = tuple(Line(number, request, name=f"{number:05d}") for number, request in enumerate(requests, 1))
    recipe = Recipe(str(find_tiny_flux()), timeout=20)
    return run_lines(recipe, lines, folder, build_without_memory)


def test_a_line_that_no_rank_can_encode_fails_after_the_others(rank_pool, tmp_path):
    first, second = rank_pool.run(encode_lines, 2, tmp_path, (0, 1))
    done = [("begin", 1), ("done", 1), ("begin", 3), ("done", 3)]
    assert first == ([*done, ("begin", 2)], [2])
    assert second[1] == [2]


@pytest.mark.long
def test_a_line_that_one_rank_cannot_encode_ends_all_ranks(rank_pool, tmp_path):
    # The first rank waits in the next line until the time-out. torchrun would end it.
    first, second = rank_pool.run(encode_lines, 2, tmp_path, (1,))
    assert "RankDied: the FluxPipeline waited 20 s for rank 1" in first[1]
    assert second[1].startswith("RankDied: OutOfMemoryError")
    assert not any(event == "done" for event, _ in first[0])
