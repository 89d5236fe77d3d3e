"""Ranks of one mesh generate one image with equal random numbers and arguments, or all raise.

After exceptions, callbacks, interrupts and calls from threads the pipe can still be used.
"""

import os
import re
import signal
import threading
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import _get_current_function_mode_stack

from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.adapters.agree import failures
from para_core.adapters.agree.arguments import PendingRecord, difference_of_pipeline_calls
from para_core.adapters.parallel.resolve import _global_ranks, _timeout_part
from para_core.distributed.mesh import find_or_make_group, guided_mesh
from para_core.distributed.point_to_point import Links
from para_core.spatial.mode import first_ranks
from tests.rank_pool import RankPoolError
from tests.tiny import (
    FLUX_CHANNELS,
    cpu_mesh,
    flux_call,
    flux_inputs,
    flux_pipe,
    flux_transformer,
    relative_error,
)
from tests.weights.links import as_nccl


def draw_without_generator(ring, ulysses):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(ring, ulysses))
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    out = pipe(**flux_call(generator=None)).images
    return out, torch.equal(torch.get_rng_state(), before), torch.get_rng_state()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2)])
def test_without_generator_ranks_draw_as_first_rank(rank_pool, ring, ulysses):
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


# Keys are the names in the error. Values are the arguments of rank 1 that differ from those of rank 0.
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


class Subclassed(FluxPipeline):
    """A user's own pipeline class."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def call_differently():
    """Return the error of each difference. Then call with equal arguments, also a user's class."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    errors = {}
    for name, options in DIFFERENCES.items():
        with pytest.raises(ValueError, match=r"FluxPipeline .*: rank 0 .*rank 1 ") as error:
            pipe(**flux_call(**(options if dist.get_rank() == 1 else {})))
        errors[name] = str(error.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'heigth'"):
        pipe(**flux_call(**({"heigth": 72} if dist.get_rank() == 1 else {})))
    subclassed = parallelize_pipe(flux_pipe(Subclassed), mesh=cpu_mesh(1, 2))
    with pytest.raises(ValueError, match=r"height: rank 0 .*72, rank 1 .*80"):
        subclassed(**flux_call(height=72 + 8 * dist.get_rank()))
    return errors, [pipe(**flux_call()).images, subclassed(**flux_call()).images]


def test_differing_calls_raise_on_every_rank(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for errors, outs in rank_pool.run(call_differently, 2):
        for name, message in errors.items():
            assert f"{name}: rank 0 " in message
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert re.search(r"rank 0 .*'a large red circle.* rank 1 .*'a small blue square'", errors["prompt"])
        assert re.search(r"height: rank 0 .*72, rank 1 .*80", errors["height"])
        assert re.search(rf"latents: .* rank 1 .*tensor\[1, 63, {FLUX_CHANNELS}\] float32", errors["latents"])


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"prompt": "a dog"}, "mesh of its own"),
        ({"callback_on_step_end": print}, "get_rank"),
        ({"output_type": "pil"}, "output_type"),
        ({"num_images_per_prompt": 2}, "num_images_per_prompt"),
        ({"generator": torch.Generator().manual_seed(1)}, "generator"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_only_other_images_are_sent_to_other_meshes(other, word):
    whole = {"prompt": "a cat", "height": 64, "num_images_per_prompt": 1}
    records = [PendingRecord(values).wait() for values in (whole, {**whole, **other}, whole)]
    message = difference_of_pipeline_calls("FluxPipeline", records)
    assert word in message
    assert ("slice of a larger mesh" in message) == ("prompt" in other)


def call_with_the_same():
    """Call with arguments that are equal on all ranks but are different objects in each process."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe(**flux_call(prompt="红" * 3000, prompt_2="🟥" * 1000, negative_prompt="é" * 1000, num_inference_steps=1))

    def keep(pipe, step, timestep, tensors):
        return tensors

    pipe(**flux_call(callback_on_step_end=keep, callback_on_step_end_tensor_inputs=["latents"], num_inference_steps=1))
    # The prompt is positional. An argument that is None equals an absent one.
    options = flux_call(num_inference_steps=1)
    prompt = options.pop("prompt")
    return pipe(prompt, **(options | ({"latents": None} if dist.get_rank() else {}))).images


def test_equal_arguments_pass_in_any_form(rank_pool):
    expected = flux_pipe()(**flux_call(num_inference_steps=1)).images
    for out in rank_pool.run(call_with_the_same, 2):
        assert relative_error(out, expected) < 1e-5


REPLICAS = [{"num_inference_steps": 2}, {"prompt": "a small blue square", "num_inference_steps": 3, "height": 64}]


def draw_two_replicas():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh["ring", "ulysses"])
    return pipe(**flux_call(**REPLICAS[mesh["replica"].get_local_rank()])).images


def test_replicas_generate_different_images(rank_pool):
    expected = [flux_pipe()(**flux_call(**options)).images for options in REPLICAS]
    for rank, out in enumerate(rank_pool.run(draw_two_replicas, 4)):
        assert relative_error(out, expected[rank // 2]) < 1e-5


def leave_in_the_middle():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    state = torch.get_rng_state()
    for kind in (ValueError, KeyboardInterrupt, SystemExit):

        def leave(pipe, step, timestep, tensors, kind=kind):
            raise kind("enough")

        def leave_inside(module, args, kind=kind):
            raise kind("enough")

        with pytest.raises(kind, match="enough"):
            pipe(**flux_call(callback_on_step_end=leave))
        hook = pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(leave_inside)
        with pytest.raises(kind, match="enough"):
            pipe(**flux_call())
        hook.remove()
        assert not _get_current_function_mode_stack()
        assert torch.equal(torch.get_rng_state(), state)
    return pipe(**flux_call()).images


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_an_exception_on_all_ranks_leaves_the_pipe_usable(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for out in rank_pool.run(leave_in_the_middle, 2):
        assert relative_error(out, expected) < 1e-5


def leave_on_one_rank(how):
    mesh = dist.new_group(timeout=timedelta(seconds=3)) if how == "of the group" else cpu_mesh(1, 2)
    timeout = {"of the group": None, "seconds": 3.0, "timedelta": timedelta(seconds=3)}[how]
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh, timeout=timeout)

    def leave(module, args):
        if dist.get_rank() == 1:
            raise ValueError("only here")

    pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(leave)
    begun = time.monotonic()
    try:
        pipe(**flux_call())
    finally:
        if dist.get_rank() == 1:
            time.sleep(4)  # The rank lives on while the others wait.
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "how", ["of the group", *[pytest.param(how, marks=pytest.mark.long) for how in ("seconds", "timedelta")]]
)
@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_exception_on_one_rank_ends_others_with_reason(rank_pool, how):
    first, second = rank_pool.run_expecting_errors(leave_on_one_rank, 2, how)
    assert isinstance(second, ValueError)
    assert isinstance(first, RuntimeError)
    assert re.search(r"rank 1 .*ValueError: only here", str(first))


def die_on_one_rank(where):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), timeout=3.0)

    def die(*args):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return args[-1]

    if where == "in a block":
        pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(die)
    begun = time.monotonic()
    try:
        # The pool ends the other ranks soon after one has died.
        with mock.patch.object(failures, "_PATIENCE", 0.2):
            pipe(**flux_call(callback_on_step_end=die if where == "in a callback" else None))
    finally:
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("where", ["in a block", "in a callback"])
@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_dying_rank_is_named_in_time(rank_pool, where):
    with pytest.raises(
        RankPoolError,
        match=r"(?s)RuntimeError: [^\n]*rank 1 \(process.*rank 1 died",
    ):
        rank_pool.run(die_on_one_rank, 2, where)


def call_from_two_threads():
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    inputs = flux_inputs(10, 3)
    errors = []

    def call_again(module, args):
        if threading.current_thread() is not threading.main_thread():
            return
        thread = threading.Thread(target=call_and_keep_error)
        thread.start()
        thread.join()

    def call_and_keep_error():
        try:
            transformer(**inputs)
        except RuntimeError as error:
            errors.append(str(error))

    with torch.no_grad():
        hook = transformer.transformer_blocks[1].register_forward_pre_hook(call_again)
        out = transformer(**inputs).sample
        hook.remove()
    return errors, out, transformer(**inputs).sample


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hooks of this test only observe, or raise.
def test_second_thread_in_transformer_raises(rank_pool):
    expected = flux_transformer()(**flux_inputs(10, 3)).sample
    for errors, *outs in rank_pool.run(call_from_two_threads, 2):
        assert len(errors) == 1
        assert re.search(r"FluxTransformer2DModel .*thread", errors[0])
        assert max(relative_error(out, expected) for out in outs) < 1e-5


def build_after_group_is_gone():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"'ulysses' \(2 ranks\) .*destroyed"):
        pipe(**flux_call())


def test_call_after_destroyed_group_raises(rank_pool):
    rank_pool.run(build_after_group_is_gone, 2)


def timeouts_after_a_change():
    """Return the time-out in seconds of each para_core group, by its description: groups inside a mesh of two ranks,
    and one of three ranks.
    """
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("pipe",))
    find_or_make_group("para_core: of three ranks", [0, 1, 2], timeout=timedelta(seconds=50))
    if dist.get_rank() == 2:
        return None
    guided = guided_mesh(mesh)
    with as_nccl():
        Links(guided.pipe, [(0, 1), (1, 0)])
    first_ranks([0, 1], 2, like=dist.group.WORLD)
    users = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=50))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _timeout_part(flux_pipe(), guided, 7, _global_ranks(guided)).apply()
    groups = {
        group.group_desc: group for group in dist.distributed_c10d._world.pg_map if "para_core" in group.group_desc
    }
    groups |= {"the mesh": guided.pipe.group, "the user's": users}
    return {name: group._get_backend(torch.device("cpu")).options._timeout.seconds for name, group in groups.items()}


def test_a_timeout_reaches_edges_and_row_groups_that_exist(rank_pool):
    *members, _ = rank_pool.run(timeouts_after_a_change, 3)
    for seconds in members:
        assert (seconds.pop("para_core: of three ranks"), seconds.pop("the user's")) == (50, 50)
        assert len(seconds) == 4  # These are two groups of neighbours, the group of rows, and the mesh.
        assert set(seconds.values()) == {7}
