"""Lines of a prompts file that fail on some or all ranks, and lines that run after these on the same ranks."""

import json
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from PIL import Image

import para_core.cli.ranks
from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe
from para_core.cli.ranks import RankJob, _run_lines
from para_core.fleet.loading import build, find_model
from para_core.fleet.models import find_tiny_flux
from para_core.fleet.prompts import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request

STEPS = 9


def journal(folder):
    return [json.loads(text) for text in (folder / "journal").read_text().splitlines()]


def generate_lines(folder, num_stages, pipefusion, failing):
    """Generate two lines as each rank of the command does. The first one ends by an exception on all ranks at call
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
    job = RankJob(Recipe(str(find_tiny_flux())), lines, folder, folder / "journal")
    with mock.patch.object(para_core.cli.ranks, "build", lambda recipe, encode_first: pipe):
        _run_lines(job)


@pytest.mark.parametrize(("pipefusion", "failing"), [(True, 5), pytest.param(False, 3, marks=pytest.mark.long)])
def test_line_after_a_failed_one_is_exact(rank_pool, tmp_path, pipefusion, failing):
    generate_lines(tmp_path / "alone", 1, pipefusion, None)
    rank_pool.run(generate_lines, 2, tmp_path / "stages", 2, pipefusion, failing)
    events = [(event["event"], event["line"]) for event in journal(tmp_path / "stages")]
    assert events == [("begin", 1), ("failed", 1), ("begin", 2), ("done", 2)]
    images = [np.asarray(Image.open(tmp_path / name / "00002.png")).astype(int) for name in ("alone", "stages")]
    assert np.array_equal(*images)


def encode_lines(folder, failing):
    """Encode three lines as each rank of the command does. On the ranks ``failing`` the second one cannot be encoded.
    Return the name of this rank's error.
    """

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
    job = RankJob(recipe, lines, folder, folder / "journal")
    with (
        mock.patch.object(para_core.cli.ranks, "build", build_without_memory),
        mock.patch.object(para_core.cli.ranks, "_AGREEMENT_TIMEOUT", timedelta(seconds=5)),
    ):
        try:
            _run_lines(job)
        except Exception as error:
            return type(error).__name__
    return None


def events_of(folder):
    return [(event["event"], event["line"]) for event in journal(folder)]


def test_a_line_that_no_rank_can_encode_fails_after_the_others(rank_pool, tmp_path):
    assert rank_pool.run(encode_lines, 2, tmp_path, (0, 1)) == [None, None]
    done = [("begin", 1), ("done", 1), ("begin", 3), ("done", 3)]
    assert events_of(tmp_path) == [*done, ("begin", 2), ("failed", 2)]


@pytest.mark.long
def test_a_line_that_one_rank_cannot_encode_ends_all_ranks(rank_pool, tmp_path):
    # The first rank waits in the next line until the time-out. The launcher would end it.
    first, second = rank_pool.run(encode_lines, 2, tmp_path, (1,))
    assert (first, second) == ("Unanswered", "OutOfMemoryError")
    events = events_of(tmp_path)
    assert ("begin", 2) in events
    assert not any(event == "done" for event, _ in events)
