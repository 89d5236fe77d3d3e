"""Callbacks of the caller: what they see, what they change on all ranks, and what they cannot reach."""

import asyncio

import pytest
import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback, SDCFGCutoffCallback

from tests.launcher import loads

GENERATOR = torch.Generator()


def images(pipe, **arguments):
    torch.manual_seed(9)
    return loads.images(pipe, **{"num_inference_steps": 4, "generator": GENERATOR.manual_seed(7), **arguments})


def scale_by_numpy(pipe, step, timestep, tensors):
    # torch's version counter does not see this change.
    tensors["latents"].numpy()[:] *= 0.9
    return {}


def return_other_tensors(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] * 0.9, "prompt_embeds": tensors["prompt_embeds"].flip(1)}


def stop_after_two_steps(pipe, step, timestep, tensors):
    pipe._interrupt = step >= 1
    assert pipe.interrupt == (step >= 1)
    return tensors


def guide_less_at_half(pipe, step, timestep, tensors):
    if step == int(pipe.num_timesteps * 0.5):
        pipe._guidance_scale = pipe.guidance_scale / 2
        assert pipe.guidance_scale == pipe._guidance_scale
    return {"latents": tensors["latents"] * pipe.guidance_scale}


def add_noise(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] + 0.1 * (torch.randn(1, generator=GENERATOR) + torch.randn(1))}


CHANGES = (scale_by_numpy, return_other_tensors, stop_after_two_steps, guide_less_at_half, add_noise)


def test_callback_changes_what_it_would_change_in_one_process(flux, alone):
    unchanged = images(alone)
    for callback in CHANGES:
        options = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
        results = [(images(x, **options), torch.rand(1), torch.rand(1, generator=GENERATOR)) for x in (flux, alone)]
        for own, expected in zip(*results, strict=True):
            assert abs(own - expected).max() < 1e-5, callback
        assert abs(results[0][0] - unchanged).max() > 1e-3, callback


class Recorder(PipelineCallback):
    tensor_inputs = ("latents", "prompt_embeds")

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        self.seen = sorted(callback_kwargs)
        return callback_kwargs


def call_inner(pipe, prior_callback):
    """Call a pipeline that ``pipe`` combines, as combined pipelines do."""
    return pipe.decoder_pipe(1, 0.0, 0.0, 0.0, prior_callback), pipe.decoder_pipe._guidance_scale


def test_callbacks_run_here_with_the_tensors_that_they_ask_for_however_they_are_passed(steps, flux):
    seen, kept, recorder = [], [], Recorder()

    def callback(pipe, step, timestep, tensors):
        seen.append((step, *tensors))
        kept.append(pipe)
        pipe._guidance_scale += 1
        return tensors

    assert steps(2, 0.0, 0.0, 0.0, callback) == {}
    assert steps(1, 0.0, 0.0, 0.0, callback, x=1) == {"x": 1}
    assert steps.again(2, callback_on_step_end=callback) == {}
    assert steps.run(call_inner, prior_callback=callback) == ({}, 3.0)
    assert seen == [(0,), (1,), (0, "x"), (0,), (1,), (0,)]
    images(flux, callback_on_step_end=MultiPipelineCallbacks([recorder]))
    assert recorder.seen == ["latents", "prompt_embeds"]
    # diffusers' own asks for tensors that FLUX does not have, which is what FLUX says in one process too.
    with pytest.raises((ValueError, KeyError)):
        images(flux, callback_on_step_end=SDCFGCutoffCallback(cutoff_step_ratio=0.5))
    for call, message in (
        (lambda: steps(1, callbacks=[print, id]), "expected one function"),
        (lambda: steps(1, 0, 0, 0, callback, callback_on_step_end=callback), "two values for callback_on_step_end"),
        (lambda: steps(1, 0, 0, 0, callback, 7), "6 positional arguments"),
        (lambda: steps.run(lambda _, callback: callback(x for x in ()), callback=callback), "generator"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
        assert not steps._state.group.ended
    with pytest.raises(AttributeError, match="has ended"):
        kept[0]._guidance_scale = 3.0


# What a callback does with its own handle or with that of the pipeline, the error that ends its call, and its words.
COMPONENT, CALL = (AttributeError, r"run\(lambda pipe"), (RuntimeError, "callback cannot call")
REFUSED = {
    "reads through a component": (lambda pipe, flux: pipe.scheduler.sigmas, *COMPONENT),
    "sets an object": (lambda pipe, flux: setattr(pipe, "_guidance_scale", object()), *COMPONENT),
    "sets a new attribute": (lambda pipe, flux: setattr(pipe, "own", 1), *COMPONENT),
    "raises": (lambda pipe, flux: {}["own"], KeyError, "own"),
    "returns a generator": (lambda pipe, flux: {"latents": (x for x in range(3))}, TypeError, "cannot be sent"),
    "returns no dict, as in one process": (lambda pipe, flux: 3, AttributeError, "pop"),
    "calls the pipeline": (lambda pipe, flux: images(flux), *CALL),
    "runs a function": (lambda pipe, flux: flux.run(id), *CALL),
    "awaits a call": (lambda pipe, flux: asyncio.run(flux.call()), *CALL),
    "restarts": (lambda pipe, flux: flux.restart(), *CALL),
}


def test_error_of_a_callback_ends_its_call_alone(flux):
    before = loads.pids(flux)
    for what, (use, error, message) in REFUSED.items():
        steps = []

        def callback(pipe, step, timestep, tensors, steps=steps, use=use):
            steps.append(step)
            return tensors if step == 0 else use(pipe, flux) or tensors

        with pytest.raises(error, match=message):
            images(flux, callback_on_step_end=callback)
        assert steps == [0, 1], what
    assert loads.pids(flux) == before
