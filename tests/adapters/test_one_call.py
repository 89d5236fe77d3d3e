"""Ranks of one mesh draw one picture: same random numbers, same arguments, or an error on all of them."""

import time

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch.distributed.device_mesh import init_device_mesh

from para_core.adapters import parallelize_pipe
from tests.rank_pool import RankPoolError
from tests.tiny import FLUX_CHANNELS, cpu_mesh, flux_call, flux_pipe, relative_error


def draw_with_another_scheduler():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    if dist.get_rank() == 1:
        pipe.scheduler.register_to_config(shift=2.0)
    pipe(**flux_call())


def test_ranks_whose_schedulers_differ_are_told_so(rank_pool):
    with pytest.raises(RankPoolError, match=r"pipe\.scheduler: rank 0 has .*rank 1 has") as error:
        rank_pool.run(draw_with_another_scheduler, 2)
    assert "raised on 2 of 2 ranks" in str(error.value)


def draw_without_generator(ring, ulysses):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(ring, ulysses))
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    out = pipe(**flux_call(generator=None)).images
    return out, torch.equal(torch.get_rng_state(), before), torch.get_rng_state()


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2)])
def test_without_a_generator_all_draw_what_the_first_rank_would_draw_alone(rank_pool, ring, ulysses):
    pipe = flux_pipe()
    with torch.random.fork_rng():
        torch.manual_seed(100)
        expected = pipe(**flux_call(generator=None)).images
        state_alone = torch.get_rng_state()
    for rank, (out, unchanged, state) in enumerate(
        rank_pool.run(draw_without_generator, ring * ulysses, ring, ulysses)
    ):
        assert relative_error(out, expected) < 1e-5
        assert unchanged == (rank > 0)
        if rank == 0:
            assert torch.equal(state, state_alone)


# What rank 1 says otherwise than rank 0, and what the error calls it.
DIFFERENCES = {
    "prompt": {"prompt": "a small blue square"},
    "height": {"height": 80},
    "num_inference_steps": {"num_inference_steps": 3},
    "generator": {"generator": torch.Generator().manual_seed(8)},
    "latents": {"latents": torch.full((1, 63, FLUX_CHANNELS), 2.0)},
    "output_type": {"output_type": "pil"},
    "negative_prompt": {"negative_prompt": "a dog", "true_cfg_scale": 2.0},
    "true_cfg_scale": {"true_cfg_scale": 2.0},
    "callback_on_step_end": {"callback_on_step_end": print},
    "sigmas": {"sigmas": [1.0, 0.4]},
}


def call_differently():
    """On each rank the error, and seconds until it came; then a call in which all agree."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    errors = {}
    for name, options in DIFFERENCES.items():
        start = time.monotonic()
        with pytest.raises(ValueError, match="must call the FluxPipeline alike") as error:
            pipe(**flux_call(**(options if dist.get_rank() == 1 else {})))
        errors[name] = str(error.value), time.monotonic() - start
    with pytest.raises(TypeError, match="unexpected keyword argument 'heigth'") as error:
        pipe(**flux_call(**({"heigth": 72} if dist.get_rank() == 1 else {})))
    return errors, pipe(**flux_call()).images


def test_ranks_that_call_differently_raise_on_every_rank_and_name_what_differs(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for errors, out in rank_pool.run(call_differently, 2):
        for name, (message, seconds) in errors.items():
            assert f"{name}: rank 0 has" in message
            assert seconds < 5
        assert relative_error(out, expected) < 1e-5
        assert "rank 0 has 'a large red circle" in errors["prompt"][0]
        assert "rank 1 has 'a small blue square'" in errors["prompt"][0]
        assert "height: rank 0 has 72, rank 1 has 80." in errors["height"][0]
        assert f"latents: rank 0 has nothing, rank 1 has tensor[1, 63, {FLUX_CHANNELS}] float32" in errors["latents"][0]


def call_with_the_same():
    """Arguments that are equal, but not identical objects, in other processes."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe(**flux_call(prompt="红" * 3000, prompt_2="🟥" * 1000, negative_prompt="é" * 1000, num_inference_steps=1))

    def keep(pipe, step, timestep, tensors):
        return tensors

    pipe(**flux_call(callback_on_step_end=keep, callback_on_step_end_tensor_inputs=["latents"], num_inference_steps=1))
    # Positional: the prompt. Whatever is None counts as not given.
    options = flux_call(num_inference_steps=1)
    prompt = options.pop("prompt")
    return pipe(prompt, **(options | ({"latents": None} if dist.get_rank() else {}))).images


def test_what_is_equal_passes_however_it_is_given(rank_pool):
    expected = flux_pipe()(**flux_call(num_inference_steps=1)).images
    for out in rank_pool.run(call_with_the_same, 2):
        assert relative_error(out, expected) < 1e-5


REPLICAS = [{"num_inference_steps": 2}, {"prompt": "a small blue square", "num_inference_steps": 3, "height": 64}]


def draw_two_replicas():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh["ring", "ulysses"])
    return pipe(**flux_call(**REPLICAS[mesh["replica"].get_local_rank()])).images


def test_replicas_draw_different_pictures(rank_pool):
    expected = [flux_pipe()(**flux_call(**options)).images for options in REPLICAS]
    for rank, out in enumerate(rank_pool.run(draw_two_replicas, 4)):
        assert relative_error(out, expected[rank // 2]) < 1e-5


class Subclassed(FluxPipeline):
    """Somebody's own pipeline."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def call_subclass_differently():
    pipe = parallelize_pipe(flux_pipe(Subclassed), mesh=cpu_mesh(1, 2))
    with pytest.raises(ValueError, match="height: rank 0 has 72, rank 1 has 80"):
        pipe(**flux_call(height=72 + 8 * dist.get_rank()))
    return pipe(**flux_call()).images


def test_a_subclass_of_a_pipeline_is_checked_and_exact_too(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for out in rank_pool.run(call_subclass_differently, 2):
        assert relative_error(out, expected) < 1e-5
