"""Guidance over the ``batch`` mesh dim: each half of the ranks computes one branch, and the images stay the same."""

import copy
import pickle
import warnings
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel, UniPCMultistepScheduler
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from para_core.adapters import (
    AttentionSchedule,
    KeptKeys,
    apply_cache_on_pipe,
    parallelize_pipe,
    unparallelize_pipe,
)
from para_core.cfg.guidance import Guidance
from para_core.distributed.mesh import MeshDim
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines import PIPELINES

GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 2.0}
CALLS = {
    "guided": GUIDED,
    "guided, two prompts": {**GUIDED, "prompt": ["a red circle", "a large blue square on black"]},
    "guided, negative embeddings of another length": {
        "negative_prompt_embeds": torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(1)),
        "negative_pooled_prompt_embeds": torch.randn(1, 64, generator=torch.Generator().manual_seed(2)),
        "true_cfg_scale": 2.0,
    },
    "not guided": {},
    "guided again": GUIDED,
}


def draw_counting(pipe, **options):
    """Return the image, and how often this rank ran the last block of the transformer."""
    block = pipe.transformer.single_transformer_blocks[-1]
    calls = []
    hook = block.register_forward_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*FluxPipeline .*guidance")
        image = pipe(**flux_call(num_inference_steps=3, **options)).images
    hook.remove()
    return image, len(calls)


def draw_calls(batch, ring, ulysses):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(ring, ulysses, batch=batch))
    outs = {name: draw_counting(pipe, **options) for name, options in CALLS.items()}
    unparallelize_pipe(pipe)
    outs["alone again"] = draw_counting(pipe, **GUIDED)
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (3, 1, 1), (2, 2, 1)])
def test_sequential_branches_are_distributed(rank_pool, shape):
    pipe = flux_pipe()
    expected = {name: draw_counting(pipe, **options) for name, options in CALLS.items()}
    batch = shape[0]
    for rank, outs in enumerate(rank_pool.run(draw_calls, shape[0] * shape[1] * shape[2], *shape)):
        for name, options in CALLS.items():
            assert relative_error(outs[name][0], expected[name][0]) < 1e-5, f"{name}, rank {rank}"
            assert expected[name][1] == (3 if not options else 6)
        index = rank // (shape[1] * shape[2])
        assert outs["guided"][1] == outs["guided again"][1] == (3 if index < 2 else 0), (
            f"rank {rank} of {batch} branches"
        )
        assert outs["alone again"][1] == 6
        assert relative_error(outs["alone again"][0], expected["guided"][0]) < 1e-5


# These pipelines guide one branch after the other.
SEQUENTIAL = {
    "wan": {},
    "wan 2.2": {},
    "qwen-image": {},
    # It mixes each branch with the latents before it calls the next one.
    "cosmos 2, image": {},
    "hunyuan": {"negative_prompt": "a blue square", "true_cfg_scale": 3.0},
}


def generate_counting(name, mesh=None):
    """Return the latents and the number of transformer calls that this rank computed, in the first generation and after
    a change of size.
    """
    tiny, counts, outs = PIPELINES[name], [], []
    pipe = tiny.build()
    if mesh is not None:
        parallelize_pipe(pipe, mesh=mesh)
    for transformer in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if transformer is not None:
            transformer.proj_out.register_forward_hook(lambda *_: counts.__setitem__(-1, counts[-1] + 1))
    for options in ({}, {"height": 32}):
        counts.append(0)
        outs.append(pipe(**tiny.call(**{**SEQUENTIAL[name], **options}, num_inference_steps=4))[0])
    return outs, counts


def generate_counting_on(name, *shape):
    return generate_counting(name, cpu_mesh(*shape[1:], batch=shape[0]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(2, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_half_of_calls_are_computed_from_first_step(rank_pool, name, shape):
    expected, counts = generate_counting(name)
    assert counts == [8, 8]
    for outs, counts in rank_pool.run(generate_counting_on, torch.Size(shape).numel(), name, *shape):
        assert max(relative_error(out, alone) for out, alone in zip(outs, expected, strict=True)) < 1e-5
        assert counts == [4, 4]


def look_on_one_rank(name):
    norms = []

    def look(pipe, step, timestep, tensors):
        if torch.distributed.get_rank() == 0:
            norms.append(float(tensors["latents"].norm()))
        # A user who writes a file on one rank may wait for the others like this.
        torch.distributed.barrier()
        return {}

    pipe = parallelize_pipe(PIPELINES[name].build(), mesh=cpu_mesh(1, 1, batch=2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Cosmos2VideoToWorldPipeline .*guidance")
        # Without guidance one rank has no branch, so only the callback needs the results of a step.
        out = pipe(**PIPELINES[name].call(callback_on_step_end=look, guidance_scale=1.0))[0]
    return float(out.norm()), norms


def test_callback_reads_latents_on_one_rank(rank_pool):
    (norm, norms), (_, nothing) = rank_pool.run(look_on_one_rank, 2, "cosmos 2, image")
    assert norms[-1] == norm
    assert (len(norms), nothing) == (3, [])


def count_by_pipeline(name):
    """Return how many transformer calls this rank computed in the second generation, when the output's shape is
    known.
    """
    tiny, calls = PIPELINES[name], []
    pipe = parallelize_pipe(tiny.build(), mesh=cpu_mesh(1, 1, batch=2))
    pipe(**tiny.call())
    pipe.transformer.proj_out.register_forward_hook(lambda *_: calls.append(1))
    pipe(**tiny.call())
    return len(calls)


@pytest.mark.parametrize("name", ["cosmos 2.5", "cosmos 3"])
def test_ranks_share_branches_after_preprocessing(rank_pool, name):
    assert rank_pool.run(count_by_pipeline, 2, name) == [3, 3]


def draw_compiled(way):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 1, batch=2))
    counter = CompileCounterWithBackend("eager")
    if way == "torch.compile":
        pipe.transformer = torch.compile(pipe.transformer, backend=counter, fullgraph=True)
    elif way == "in place":
        pipe.transformer.compile(backend=counter, fullgraph=True)
    else:
        pipe.transformer.compile_repeated_blocks(backend=counter, fullgraph=True)
    images = [pipe(**flux_call(**GUIDED)).images]
    rounds, graphs = [], counter.frame_count

    def spy(self, calls):
        rounds.append([bool(call.leaves) for call in calls])
        return exchange(self, calls)

    exchange = Guidance._exchange
    with mock.patch.object(Guidance, "_exchange", spy):
        images.append(pipe(**flux_call(**GUIDED)).images)
    assert counter.frame_count == graphs
    unparallelize_pipe(pipe)
    return [*images, pipe(**flux_call(**GUIDED)).images], rounds


@pytest.mark.parametrize(
    "way", ["torch.compile", *[pytest.param(way, marks=pytest.mark.long) for way in ("in place", "blocks")]]
)
@pytest.mark.long
def test_branches_are_shared_out_compiled(rank_pool, way):
    expected = flux_pipe()(**flux_call(**GUIDED)).images
    for rank, (images, rounds) in enumerate(rank_pool.run(draw_compiled, 2, way)):
        assert rounds == [[rank == 0, rank == 1]] * 2
        errors = [relative_error(image, expected) for image in images]
        assert max(errors) < 1e-5, errors


def call_with_an_unknown_argument():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 1, batch=2))
    expected = pipe(**flux_call(**GUIDED)).images
    component, steps = pipe.transformer, []

    def mistaken(pipe, step, timestep, tensors):
        steps.append(component(**flux_inputs(4, 3), return_dict=False))
        component(**flux_inputs(4, 3), return_dict=False, guidance_of_another_model=3.0)

    with pytest.raises(TypeError, match="unexpected keyword argument 'guidance_of_another_model'"):
        pipe(**flux_call(**GUIDED, callback_on_step_end=mistaken))
    return len(steps), relative_error(pipe(**flux_call(**GUIDED)).images, expected)


def test_unknown_argument_of_shared_call_raises_everywhere(rank_pool):
    assert rank_pool.run(call_with_an_unknown_argument, 2) == [(1, 0.0)] * 2


def draw_without_guidance():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 1, batch=2))
    with pytest.warns(UserWarning, match=r"guidance.* 2 ranks .*'batch'") as caught:
        image = pipe(**flux_call(num_inference_steps=4)).images
    return image, len([warning for warning in caught if "no branches" in str(warning.message)])


def test_call_without_guidance_is_exact_and_warns_once(rank_pool):
    expected = flux_pipe()(**flux_call(num_inference_steps=4)).images
    for image, warned in rank_pool.run(draw_without_guidance, 2):
        assert relative_error(image, expected) < 1e-5
        assert warned == 1


def other_pipe_of(pipe):
    """Return a pipeline with the models of ``pipe`` and its own scheduler."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other = type(pipe)(**{**pipe.components, "scheduler": scheduler})
    other.set_progress_bar_config(disable=True)
    return other


def draw_in_callback(batch, threshold):
    """Return the images of a pipeline and of a second one with its transformer, which a callback runs, and how often
    this rank ran the last block.
    """
    pipe = flux_pipe()
    other = other_pipe_of(pipe)
    if batch > 1:
        for each in (pipe, other):
            parallelize_pipe(each, mesh=cpu_mesh(1, 1, batch=batch))
    if threshold is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, warmup_steps=1)
    inner = []

    def draw_other(pipe, step, timestep, tensors):
        if step == 1:
            inner.append(other(**flux_call(**GUIDED)).images)
        return {}

    outer = [draw_counting(pipe, **GUIDED, callback_on_step_end=draw_other) for _ in range(2)]
    return [image for image, _ in outer], inner, [count for _, count in outer]


@pytest.mark.parametrize("threshold", [None, 0.7])
def test_callback_draws_with_another_pipe_of_the_transformer(rank_pool, threshold):
    outer, inner, counts = draw_in_callback(1, threshold)
    for rank_outer, rank_inner, rank_counts in rank_pool.run(draw_in_callback, 2, 2, threshold):
        errors = [relative_error(*pair) for pair in zip(rank_outer + rank_inner, outer + inner, strict=True)]
        assert max(errors) < 1e-5, errors
        assert rank_counts == [count // 2 for count in counts]


def undo_after_swap(backend):
    pipe = flux_pipe()
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 1, batch=2), backend=backend)
    draw_counting(pipe, **GUIDED)
    swapped, pipe.transformer = pipe.transformer, flux_transformer()
    unparallelize_pipe(pipe)
    assert type(swapped) is FluxTransformer2DModel


def test_undo_unwraps_a_transformer_that_was_swapped(rank_pool):
    rank_pool.run(undo_after_swap, 2, AttentionSchedule(KeptKeys(0.5, window=10_000), first=0, last=0))


def tensors_of(scheduler):
    return [x for x in pytree.tree_leaves(vars(scheduler)) if isinstance(x, torch.Tensor)]


def keep_what_a_generation_leaves(batch, *, callback, fail=False, **options):
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    if batch > 1:
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 1, batch=batch))
    kept = []

    def keep(pipe, step, timestep, tensors):
        kept.append(tensors["latents"])
        if fail and step == 1:
            raise KeyError("stop")
        return {}

    if callback:
        options["callback_on_step_end"] = keep
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*WanPipeline .*guidance")
        try:
            pipe(**tiny.call(num_inference_steps=3, **options))
        except KeyError:
            assert fail
    tensors = [*kept, *tensors_of(pipe.scheduler)]
    assert all(type(x) is torch.Tensor for x in tensors)
    assert all(type(x) is torch.Tensor for x in tensors_of(copy.deepcopy(pipe.scheduler)))
    pickle.loads(pickle.dumps(pipe.scheduler))
    return tensors


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options",
    [
        {"callback": True},
        {"callback": True, "fail": True},
        {"callback": False},
        {"callback": False, "guidance_scale": 1.0},
    ],
    ids=["callback", "failure", "guided", "not guided"],
)
def test_kept_results_are_ordinary_tensors_after_the_call(rank_pool, options, batch):
    expected = keep_what_a_generation_leaves(1, **options)
    for tensors in rank_pool.run(keep_what_a_generation_leaves, batch, batch, **options):
        assert len(tensors) == len(expected)
        for x, wanted in zip(tensors, expected, strict=True):
            assert relative_error(x, wanted) < 1e-5 or torch.equal(x, wanted)


def test_lazy_tensor_without_data_becomes_nan():
    guidance = Guidance(MeshDim("batch", 2, 1, "", None), lambda *_: torch.zeros(2, 3, device="meta"))
    with pytest.raises(KeyError), guidance.generation():
        out = guidance.call(None, lambda x: x, (torch.ones(2, 3),), {})
        total = out + 1
        assert type(total) is not torch.Tensor
        raise KeyError("stop")
    for x in (out, total):
        assert type(x) is torch.Tensor
        assert x.shape == (2, 3)
        assert x.isnan().all()
