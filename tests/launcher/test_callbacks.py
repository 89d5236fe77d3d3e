"""Callbacks of the caller: what they see, what they change on all ranks, and what they cannot reach."""

import os

import pytest
import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback, SDCFGCutoffCallback

from tests.launcher import loads


def images(pipe, **arguments):
    generator = torch.Generator().manual_seed(7)
    return loads.images(pipe, **{"num_inference_steps": 4, "generator": generator, **arguments})


def scale_in_place(pipe, step, timestep, tensors):
    tensors["latents"].mul_(0.9)
    return {}


def scale_by_numpy(pipe, step, timestep, tensors):
    # torch's version counter does not see this change.
    tensors["latents"].numpy()[:] *= 0.9
    return tensors


def return_other_tensors(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] * 0.9, "prompt_embeds": tensors["prompt_embeds"].flip(1)}


def replace_in_the_dict(pipe, step, timestep, tensors):
    tensors["latents"] = tensors["latents"] + step
    return tensors


def stop_after_two_steps(pipe, step, timestep, tensors):
    pipe._interrupt = step >= 1
    assert pipe.interrupt == (step >= 1)
    return tensors


def guide_less_at_half(pipe, step, timestep, tensors):
    if step == int(pipe.num_timesteps * 0.5):
        pipe._guidance_scale = pipe.guidance_scale / 2
        assert pipe.guidance_scale == pipe._guidance_scale
    return {"latents": tensors["latents"] * pipe.guidance_scale}


CHANGES = (scale_in_place, scale_by_numpy, return_other_tensors, replace_in_the_dict)
CHANGES += (stop_after_two_steps, guide_less_at_half)


@pytest.mark.parametrize("callback", CHANGES)
def test_callback_changes_what_it_would_change_in_one_process(flux, alone, callback):
    options = {"callback_on_step_end": callback}
    if callback is return_other_tensors:
        options["callback_on_step_end_tensor_inputs"] = ["latents", "prompt_embeds"]
    own, expected = images(flux, **options), images(alone, **options)
    assert abs(own - expected).max() < 1e-5
    assert abs(own - images(alone)).max() > 1e-3


def add_noise(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] + 0.1 * torch.randn(1)}


def test_random_numbers_of_a_callback_are_those_of_one_process(flux, alone):
    results = []
    for pipe in (flux, alone):
        torch.manual_seed(9)
        generator = torch.Generator().manual_seed(5)

        def add_both(pipe, step, timestep, tensors, generator=generator):
            noise = torch.randn(1, generator=generator) + torch.randn(1)
            return {"latents": tensors["latents"] + 0.1 * noise}

        first = images(pipe, generator=None, callback_on_step_end=add_noise)
        second = images(pipe, generator=generator, callback_on_step_end=add_both)
        results.append((first, second, torch.rand(1), torch.rand(1, generator=generator)))
    for own, expected in zip(*results, strict=True):
        assert abs(own - expected).max() < 1e-5


def test_callbacks_run_here_however_they_are_passed(steps):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append(step)
        return tensors

    assert steps(2, 0.0, 0.0, 0.0, callback) == {}
    assert steps(1, 0.0, 0.0, 0.0, callback, x=1) == {"x": 1}
    assert steps.again(2, callback_on_step_end=callback) == {}
    assert steps.run(lambda pipe, **options: pipe(1, **options), callback_on_step_end=callback) == {}
    assert seen == [0, 1, 0, 0, 1, 0]


class Recorder(PipelineCallback):
    tensor_inputs = ("latents", "prompt_embeds")

    def __init__(self):
        super().__init__()
        self.seen = []

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        self.seen.append(sorted(callback_kwargs))
        return callback_kwargs


def test_callback_objects_get_the_tensors_that_they_ask_for(flux):
    recorder, seen = Recorder(), []
    images(flux, callback_on_step_end=recorder)
    images(flux, callback_on_step_end=MultiPipelineCallbacks([recorder]))
    assert recorder.seen == [["latents", "prompt_embeds"]] * 8
    images(flux, callback_on_step_end=lambda pipe, step, timestep, tensors: seen.append([*tensors]) or tensors)
    assert seen == [["latents"]] * 4
    # diffusers' own asks for tensors that FLUX does not have, which is what FLUX says in one process too.
    with pytest.raises((ValueError, KeyError)):
        images(flux, callback_on_step_end=SDCFGCutoffCallback(cutoff_step_ratio=0.5))


def raise_own(pipe):
    raise KeyError("own")


# What a callback does, the error that ends its call, and the words of the error.
REFUSED = {
    "reads a component": (lambda pipe: pipe.transformer, AttributeError, r"run\(lambda pipe"),
    "reads through a component": (lambda pipe: pipe.scheduler.sigmas, AttributeError, r"run\(lambda pipe"),
    "sets a component": (lambda pipe: setattr(pipe, "scheduler", None), AttributeError, r"run\(lambda pipe"),
    "sets an object": (lambda pipe: setattr(pipe, "_guidance_scale", object()), AttributeError, r"run\(lambda pipe"),
    "sets a new attribute": (lambda pipe: setattr(pipe, "own", 1), AttributeError, r"run\(lambda pipe"),
    "raises": (raise_own, KeyError, "own"),
    "returns what cannot be sent": (lambda pipe: {"latents": (x for x in range(3))}, TypeError, "cannot be sent"),
    "returns no dict, as in one process": (lambda pipe: 3, AttributeError, "pop"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_error_of_a_callback_ends_its_call_alone(flux, what):
    use, error, message = REFUSED[what]
    pids = flux.run(lambda pipe: os.getpid(), all_ranks=True)
    steps = []

    def callback(pipe, step, timestep, tensors):
        steps.append(step)
        return tensors if step == 0 else use(pipe) or tensors

    with pytest.raises(error, match=message):
        images(flux, callback_on_step_end=callback)
    assert steps == [0, 1]
    images(flux, num_inference_steps=1)
    assert flux.run(lambda pipe: os.getpid(), all_ranks=True) == pids


@pytest.mark.parametrize("use", [images, lambda pipe: pipe.run(id), lambda pipe: pipe.restart()])
def test_call_inside_a_callback_raises(flux, use):
    with pytest.raises(RuntimeError, match="callback cannot call"):
        images(flux, callback_on_step_end=lambda *_: use(flux))


def test_several_callbacks_and_an_ended_one_are_refused(steps):
    with pytest.raises(TypeError, match="expected one function"):
        steps(1, callbacks=[print, id])
    kept = []
    steps(1, callback_on_step_end=lambda pipe, step, timestep, tensors: kept.append(pipe) or tensors)
    with pytest.raises(AttributeError, match="has ended"):
        kept[0]._guidance_scale = 3.0
