"""Ranks of one mesh generate one image with equal arguments, or all raise, and the pipe can still be used."""

import os
import re
import signal
import threading
import time
import uuid
from decimal import Decimal
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from PIL import Image
from torch.overrides import _get_current_function_mode_stack

from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.adapters.agree import failures
from para_core.adapters.agree.arguments import agree_on_values, describe_value
from para_core.distributed.mesh import one_guided_rank
from para_core.plans.region import region_of
from tests.rank_pool import RankPoolError
from tests.tiny import FLUX_CHANNELS, cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines.options import random_image, random_video

# The hooks of these tests only observe, or raise.
pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


def image_alone(**options):
    return flux_pipe()(**flux_call(**options)).images


# Keys are the names in the error. Values are the argument of rank 1 and words of the error.
DIFFERENCES = {
    "prompt": ("a small blue square", r"rank 0 .*'a large red circle.* rank 1 .*'a small blue square'"),
    "height": (80, "rank 0 .*72, rank 1 .*80"),
    "latents": (torch.ones(1, 63, FLUX_CHANNELS), rf"rank 0 .*rank 1 .*tensor\[1, 63, {FLUX_CHANNELS}\] float32"),
    "true_cfg_scale": (2.0, "rank 0 .*rank 1 .*2"),
    "callback_on_step_end": (print, "rank 0 .*rank 1 "),
}


class Subclassed(FluxPipeline):
    """A user's own pipeline class."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def call_differently():
    pipe, is_last = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2)), dist.get_rank() == 1
    for name, (value, words) in DIFFERENCES.items():
        with pytest.raises(ValueError, match=rf"FluxPipeline .*{name}: {words}"):
            pipe(**flux_call(**({name: value} if is_last else {})))
    with pytest.raises(TypeError, match="unexpected keyword argument 'heigth'"):
        pipe(**flux_call(**({"heigth": 72} if is_last else {})))
    subclassed = parallelize_pipe(flux_pipe(Subclassed), mesh=cpu_mesh(1, 2))
    with pytest.raises(ValueError, match=r"height: rank 0 .*72, rank 1 .*80"):
        subclassed(**flux_call(height=72 + 8 * dist.get_rank()))
    # Internal values of the scheduler's config have no fixed order.
    pipe.scheduler.register_to_config(_use_default_values=[dist.get_rank()])
    # Arguments that are equal on all ranks are different objects in each process.
    pipe(**flux_call(prompt="红" * 3000, prompt_2="🟥" * 1000, negative_prompt="é" * 1000, num_inference_steps=1))
    pipe(**flux_call(callback_on_step_end=lambda *x: x[-1], callback_on_step_end_tensor_inputs=["latents"]))
    # The prompt is positional. An argument that is None equals an absent one.
    options = flux_call()
    out = pipe(options.pop("prompt"), **(options | ({"latents": None} if is_last else {}))).images
    assert max(relative_error(x, image_alone()) for x in (out, subclassed(**flux_call()).images)) < 1e-5


IMAGES = [random_image(8, 8, seed=seed) for seed in (1, 2)]
VIDEOS = [[*random_video(2, 8, 8), image] for image in IMAGES]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({"template": "{}", "start": 1}, {"template": "{}", "start": 2}),
        (IMAGES[0], IMAGES[1]),
        (VIDEOS[0], VIDEOS[1]),
        (LTXVideoCondition(video=VIDEOS[0], strength=0.8), LTXVideoCondition(video=VIDEOS[1], strength=0.8)),
        (np.arange(6), np.arange(6)[::-1]),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.float32, np.float32),
        ((1, None), (1, "None")),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (Image.new("L", (2, 2)), Image.new("P", (2, 2))),
        (Image.new("P", (2, 2), "red"), Image.new("P", (2, 2), "blue")),
        (np.array(["a", {}], object), np.array(["b", {}], object)),
        (uuid.SafeUUID.safe, uuid.SafeUUID.unsafe),
        (re.RegexFlag(1 << 20), re.RegexFlag(1 << 21)),
        (Decimal("0.1"), Decimal("0.2")),
        ({"a", "b"}, {"a", "c"}),
        (range(5), range(6)),
        (print, 1),
        (torch.arange(6.0).view(2, 3)[:1, :1], torch.ones(1, 1)),
        ((torch.ones(2, dtype=torch.complex64) * 1j).conj(), torch.ones(2, dtype=torch.complex64) * 1j),
        (torch.tensor([True, False]), torch.tensor([1, 0])),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
    ],
)
def test_texts_of_values_differ_as_the_values(value, other):
    assert describe_value(value) != describe_value(other)
    assert describe_value([value]) == describe_value((value,)) != describe_value([other])
    assert len(describe_value(value)) <= 100
    if isinstance(value, torch.Tensor):  # The layout in memory does not matter.
        copied = value.resolve_conj().clone(memory_format=torch.contiguous_format)
        assert describe_value(value) == describe_value(copied)


def test_equal_values_of_other_types_or_orders_have_equal_texts():
    assert describe_value({"a": 1, "b": 2.5}) == describe_value({"b": np.float64(2.5), "a": np.int64(1)})
    assert describe_value([True, "x", b"y"]) == describe_value([np.bool_(True), np.str_("x"), np.bytes_(b"y")])
    assert len({describe_value(np.array([{}, 1], object)) for _ in range(2)}) == 1


def leave_in_the_middle():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    state = torch.get_rng_state()
    for kind in (ValueError, KeyboardInterrupt, SystemExit):

        def leave(*_, kind=kind):
            raise kind("enough")

        with pytest.raises(kind, match="enough"):
            pipe(**flux_call(callback_on_step_end=leave))
        hook = pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(leave)
        with pytest.raises(kind, match="enough"):
            pipe(**flux_call())
        hook.remove()
        assert not _get_current_function_mode_stack()
        assert torch.equal(torch.get_rng_state(), state)
    assert relative_error(pipe(**flux_call()).images, image_alone()) < 1e-5
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"'ulysses' \(2 ranks\) .*destroyed"):
        pipe(**flux_call())


def leave_on_one_rank(how, timeout):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), timeout=timeout)

    def leave(*args):
        if dist.get_rank() == 1:
            if how.startswith("raises"):
                raise ValueError("only here")
            os.kill(os.getpid(), signal.SIGKILL)
        return args[-1]

    if how == "raises before the first step":
        region_of(pipe.transformer).check_new_code = leave
    if how != "dies in a callback":
        pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(leave)
    begun = time.monotonic()
    try:
        # The pool ends the other ranks soon after one has died.
        with mock.patch.object(failures, "_SIGN_IN", 0.2):
            pipe(**flux_call(callback_on_step_end=leave if how == "dies in a callback" else None))
    finally:
        if how.startswith("raises") and dist.get_rank() == 1:
            time.sleep(timeout + 1)  # The rank lives on while the others wait.
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("how", ["raises", "raises before the first step"])
def test_exception_on_one_rank_ends_others_with_reason(rank_pool, how):
    first, second = rank_pool.run_expecting_errors(leave_on_one_rank, 2, how, 1.0)
    assert isinstance(second, ValueError) and isinstance(first, RuntimeError)
    assert re.search(r"rank 1 .*ValueError: only here", str(first))


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["dies in a block", "dies in a callback"])
def test_dying_rank_is_named_in_time(rank_pool, how):
    with pytest.raises(RankPoolError, match=r"(?s)RuntimeError: [^\n]*rank 1 \(process.*rank 1 died"):
        rank_pool.run(leave_on_one_rank, 2, how, 3.0)


@torch.no_grad()
def call_from_two_threads():
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    inputs, num_errors = flux_inputs(10, 3), []

    def call_again(module, args):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=call_and_keep_error)
            thread.start()
            thread.join()

    def call_and_keep_error():
        with pytest.raises(RuntimeError, match=r"FluxTransformer2DModel .*thread"):
            transformer(**inputs)
        num_errors.append(1)

    hook = transformer.transformer_blocks[1].register_forward_pre_hook(call_again)
    out = transformer(**inputs).sample
    hook.remove()
    assert num_errors == [1]
    expected = flux_transformer()(**inputs).sample
    assert max(relative_error(x, expected) for x in (out, transformer(**inputs).sample)) < 1e-5


@pytest.mark.parametrize("job", [call_differently, leave_in_the_middle, call_from_two_threads])
def test_on_two_ranks(rank_pool, job):
    rank_pool.run(job, 2)


def test_every_error_of_a_check_is_exchanged():
    # If it were raised without an exchange, its message would name no rank, and other ranks would wait.
    for error, message in ((ImportError("no sage"), "0: no sage"), (KeyError("scheduler"), "0: KeyError: 'scheduler'")):
        with pytest.raises((ImportError, RuntimeError), match=f"mesh rank {message}"):
            agree_on_values(dict, one_guided_rank("cpu"), "the call", mock.Mock(side_effect=error), str)
