"""Callbacks of the caller: what they see, what they change on all ranks, and what they cannot reach."""

import pytest
import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback, SDCFGCutoffCallback

from tests.launcher.loads import load_flux
from tests.launcher.test_calls import ARGUMENTS


@pytest.fixture(scope="module")
def alone():
    return load_flux()


def images(pipe, **arguments):
    generator = torch.Generator().manual_seed(7)
    return pipe(**{**ARGUMENTS, "num_inference_steps": 4, "generator": generator, **arguments}).images


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


@pytest.mark.parametrize(
    "callback",
    [
        scale_in_place,
        scale_by_numpy,
        return_other_tensors,
        replace_in_the_dict,
        stop_after_two_steps,
        guide_less_at_half,
    ],
)
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


def test_callbacks_of_methods_and_run_run_here(steps):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append(step)
        return tensors

    assert steps.again(2, callback_on_step_end=callback) == {}
    assert steps.run(lambda pipe, **options: pipe(1, **options), callback_on_step_end=callback) == {}
    assert seen == [0, 1, 0]


def test_several_callbacks_in_a_list_are_refused(steps):
    with pytest.raises(TypeError, match="expected one function"):
        steps(1, callbacks=[print, id])


def test_pipeline_of_an_ended_callback_cannot_be_set(steps):
    kept = []
    steps(1, callback_on_step_end=lambda pipe, step, timestep, tensors: kept.append(pipe) or tensors)
    with pytest.raises(AttributeError, match="has ended"):
        kept[0]._guidance_scale = 3.0


def test_callback_runs_here(flux):
    seen = []
    images(flux, callback_on_step_end=lambda pipe, *rest: seen.append(rest) or rest[-1])
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert [set(tensors) for _, _, tensors in seen] == [{"latents"}] * 4


class Recorder(PipelineCallback):
    tensor_inputs = ("latents", "prompt_embeds")

    def __init__(self):
        super().__init__()
        self.seen = []

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        self.seen.append(sorted(callback_kwargs))
        return callback_kwargs


def test_callback_object_of_the_user_runs_here(flux):
    recorder = Recorder()
    images(flux, callback_on_step_end=recorder)
    assert recorder.seen == [["latents", "prompt_embeds"]] * 4
    images(flux, callback_on_step_end=MultiPipelineCallbacks([recorder]))
    assert len(recorder.seen) == 8


def test_callback_object_of_diffusers_runs_on_the_ranks(flux):
    # It asks for tensors that FLUX does not have, which is what FLUX says in one process too.
    with pytest.raises((ValueError, KeyError)):
        images(flux, callback_on_step_end=SDCFGCutoffCallback(cutoff_step_ratio=0.5))


@pytest.mark.parametrize(
    "use",
    [
        lambda pipe: pipe.transformer,
        lambda pipe: pipe.scheduler.sigmas,
        lambda pipe: setattr(pipe, "scheduler", None),
        lambda pipe: setattr(pipe, "_guidance_scale", object()),
        lambda pipe: setattr(pipe, "own", 1),
    ],
)
def test_other_attributes_are_refused_in_a_callback(flux, use):
    with pytest.raises(AttributeError, match=r"run\(lambda pipe"):
        images(flux, callback_on_step_end=lambda pipe, step, timestep, tensors: use(pipe) or tensors)


def test_what_a_callback_raises_ends_the_call(flux):
    pids = flux.run(lambda pipe: __import__("os").getpid(), all_ranks=True)
    steps = []

    def callback(pipe, step, timestep, tensors):
        steps.append(step)
        if step == 1:
            raise KeyError("own")
        return tensors

    with pytest.raises(KeyError, match="own"):
        images(flux, callback_on_step_end=callback)
    assert steps == [0, 1]
    images(flux)
    assert flux.run(lambda pipe: __import__("os").getpid(), all_ranks=True) == pids


def test_positional_callback_runs_here(steps):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append(step)
        return tensors

    assert steps(2, 0.0, 0.0, 0.0, callback) == {}
    assert steps(1, 0.0, 0.0, 0.0, callback, x=1) == {"x": 1}
    assert seen == [0, 1, 0]


@pytest.mark.parametrize("use", [images, lambda pipe: pipe.run(id), lambda pipe: pipe.restart()])
def test_call_inside_a_callback_raises(flux, use):
    def callback(pipe, step, timestep, tensors):
        use(flux)

    with pytest.raises(RuntimeError, match="callback cannot call"):
        images(flux, callback_on_step_end=callback)


def test_callback_without_a_dict_fails_as_in_one_process(flux, alone):
    for pipe in (alone, flux):
        with pytest.raises(AttributeError, match="pop"):
            images(pipe, callback_on_step_end=lambda *args: None)


def test_callback_that_returns_what_cannot_be_sent_ends_its_call_alone(steps):
    pids = steps.run(lambda pipe: __import__("os").getpid(), all_ranks=True)
    with pytest.raises(TypeError, match="cannot be sent"):
        steps(3, callback_on_step_end=lambda *args: {"x": (x for x in range(3))})
    assert steps.run(lambda pipe: __import__("os").getpid(), all_ranks=True) == pids
