"""The step that a cache assigns to a call, compared with the timesteps that the pipeline gives its scheduler."""

import inspect
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from para_core.adapters import apply_cache_on_pipe, cache_report
from para_core.adapters.inspect.scheduler_tracker import SchedulerTracker
from para_core.adapters.registry import adapter_for, transformers_of
from tests.adapters.test_pipelines import build, generate, long_but
from tests.cache.scripted import verdicts
from zoo.tiny.pipelines import PIPELINES

pytestmark = pytest.mark.filterwarnings("ignore:.*cache ")
FORCING = [name for name in PIPELINES if "forcing" in name]
# AnyFlow FAR is not cached, and Qwen-Image 2.1 is not either while it keeps its own keys (use_kv_cache).
WHOLE = [name for name in PIPELINES if name not in (*FORCING, "anyflow far", "qwen-image 2.1")]
IN_PART = [name for name in PIPELINES if "strength" in PIPELINES[name].options]
IN_PART += ["ltx, condition", "flux2 klein, inpainting"]


def cached(name, **options):
    """Return a pipeline with a cache. Skip the test if the family of its transformer is deleted (tests/lift_out.py)."""
    pipe = build(name)
    if not any(map(adapter_for, transformers_of(pipe).values())):
        pytest.skip(f"{name} belongs to a family that is not there.")
    return apply_cache_on_pipe(pipe, **options)


def followed(pipe, name, **options):
    """Return the timestep of each scheduler step with the position of the call before it, and all positions."""
    taken, positions = [], []
    take, position_of = type(pipe.scheduler).step, SchedulerTracker.next_position

    def watched_take(scheduler, output, timestep, *args, **kwargs):
        # Cosmos 1 takes each step twice, without calling the model in between.
        if scheduler is pipe.scheduler and not (taken and taken[-1][1] is positions[-1]):
            taken.append((float(torch.as_tensor(timestep).flatten()[0]), positions[-1]))
        return take(scheduler, output, timestep, *args, **kwargs)

    def watched_position_of(tracker, branch):
        positions.append(position_of(tracker, branch))
        return positions[-1]

    with (
        mock.patch.object(type(pipe.scheduler), "step", watched_take),
        mock.patch.object(SchedulerTracker, "next_position", watched_position_of),
    ):
        generate(pipe, name, **options)
    return taken, positions


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", long_but([*IN_PART, "ltx, long", "ltx2, dfr", "ltx2", "framepack", "cosmos"], WHOLE))
def test_every_pipeline_is_followed_step_by_step(name):
    pipe = cached(name, residual_diff_threshold=0.0)
    parameters = inspect.signature(type(pipe).__call__).parameters
    in_part = dict.fromkeys(("strength", "denoise_strength") & parameters.keys(), 0.5)
    taken, _ = followed(pipe, name, num_inference_steps=4, **in_part)
    assert len(taken) == 2 if in_part else taken
    # Each section of a video is counted from its first step to its last.
    expected = []
    while len(expected) < len(taken):
        expected += range(taken[len(expected)][1].num_steps)
    assert [position.step for _, position in taken] == expected
    # DPM-Solver's timesteps are integers, and some pipelines pass them in 16 bits.
    assert [position.time for _, position in taken] == pytest.approx([time for time, _ in taken], rel=1e-3)


def test_timesteps_may_be_a_list_and_steps_at_one_timestep_are_those_of_tiles():
    scheduler, tracker = FlowMatchEulerDiscreteScheduler(), SchedulerTracker()
    scheduler.timesteps = [900, torch.tensor(0.5)]
    with tracker.follow(mock.Mock(scheduler=scheduler, _num_timesteps=2), print):
        assert tracker.next_position("cond") == (0, 2, 900.0)
        # Memory of the size of the second, once freed, is used again at once.
        for time, expected in (lambda: scheduler.timesteps[0], [0, 1, None]), (lambda: torch.ones(10**7), [0, 1, 2]):
            scheduler.set_timesteps(3)
            scheduler.set_begin_index(0)
            step = lambda: scheduler.step(torch.ones(1), time(), torch.ones(1))  # noqa: B023, E731
            assert [(tracker.note_call(), step())[0] for _ in range(3)] == expected


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", long_but(["skyreels v2, forcing from a video"], FORCING))
def test_calls_are_counted_if_copies_of_the_scheduler_step(name, named):
    options = {"residual_diff_threshold": 1e9, "start": 0.3, "end": 0.9, "always_compute_last": True}
    pipe, sections = cached(name, **options), []
    if not named:
        pipe.transformer.cache_context = nullcontext

    def note_sections(pipe, step, timestep, tensors):
        if step == 0:
            sections.append(pipe.num_timesteps)
        return tensors

    _, positions = followed(pipe, name, num_inference_steps=8, callback_on_step_end=note_sections)
    assert len(sections) > (name != "skyreels v2, forcing from an image")
    expected, steps = [], [step for total in sections for step in range(total)]
    for total in sections:
        outside = [not 0.3 <= step / total < 0.9 or step == total - 1 for step in range(total)]
        expected += ["warmup", *["schedule" if out else "hit" for out in outside[1:]]]
    for branch in ("cond", "uncond") if named else ("branch 0", "branch 1"):
        assert verdicts(cache_report(pipe), branch) == expected
        assert [row.step for row in cache_report(pipe).rows if row.branch == branch] == steps
    # Forecasts need times that decrease within a section.
    assert all(later.time < earlier.time or later.step <= earlier.step for earlier, later in pairwise(positions))
