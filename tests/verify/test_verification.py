"""verify=True reports equal outputs. Other outputs raise on every rank, and the error names the first module that
differs.
"""

import logging
import warnings
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import nn

from para_core import ParallelWarning
from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)
from para_core.plans.attention_check import AttentionCheck
from para_core.verify import verification
from tests.adapters.test_transformers import SIZES, call
from tests.plans.test_attention_check import HandMade
from tests.plans.test_foreign_code import FirstTokens, Mixing, Subclass, as_class
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


class Counter:
    """A counter of the calls of the transformer's first block, on whole inputs and on parts."""

    def __init__(self, transformer, total):
        self.whole = self.parts = 0

        def count(module, args, kwargs):
            if kwargs["hidden_states"].shape[1] == total:
                self.whole += 1
            else:
                self.parts += 1

        transformer.transformer_blocks[0].register_forward_pre_hook(count, with_kwargs=True)


@contextmanager
def logged():
    """Yield the messages that the verification logs at level INFO."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger(verification.__name__)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def verify_sizes(ring, ulysses):
    """Call a transformer twice at each of two sizes, and once more after its code has changed. Then remove the plan."""
    transformer = flux_transformer()
    classes = [type(part) for part in transformer.modules()]
    counter = Counter(transformer, 13)
    parallelize_transformer(transformer, mesh=cpu_mesh(ring, ulysses), verify=True)
    counts, outs = [], []
    with torch.no_grad(), logged() as texts:
        for image in (13, 13, 9, 9):
            outs.append(transformer(**flux_inputs(image, 5)).sample)
            counts.append((counter.whole, counter.parts))
        transformer.transformer_blocks[1].register_forward_hook(lambda *_: None)
        outs.append(transformer(**flux_inputs(13, 5)).sample)
        counts.append((counter.whole, counter.parts))
        unparallelize_transformer(transformer)
        outs.append(transformer(**flux_inputs(13, 5)).sample)
    assert all(type(part) is cls for part, cls in zip(transformer.modules(), classes, strict=True))
    return counts, outs, texts


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_each_size_costs_one_more_call_and_new_code_another(rank_pool, mesh):
    with torch.no_grad():
        expected = {image: flux_transformer()(**flux_inputs(image, 5)).sample for image in (13, 9)}
    for rank, (counts, outs, texts) in enumerate(rank_pool.run(verify_sizes, 2, *mesh)):
        assert counts == [(1, 1), (1, 2), (1, 4), (1, 5), (2, 6)]
        for out, image in zip(outs, (13, 13, 9, 9, 13, 13), strict=True):
            assert relative_error(out, expected[image]) < 1e-5
        assert len(texts) == (3 if rank == 0 else 0)


class Bypass(HandMade):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        tokens = torch.cat([encoder_hidden_states, hidden_states], 1)
        out = (tokens @ tokens.mT / tokens.shape[-1] ** 0.5).softmax(-1) @ tokens
        text = encoder_hidden_states.shape[1]
        return out[:, text:], out[:, :text]


def unchecked(check, planned, run, module, args, kwargs):
    """Stand for the check that attention is intercepted, which finds a bypass before the comparison."""
    planned.intercepted[0] = True
    return run(module, *args, **kwargs)


def change(transformer, kind):
    """Make the code of a transformer use its number of tokens."""
    blocks = transformer.transformer_blocks
    if kind == "hook":
        blocks[0].register_forward_hook(lambda module, args, output: [x - x.mean(1, keepdim=True) for x in output])
    if kind == "submodule":
        blocks[1].ff = Mixing(blocks[1].ff)
    if kind == "processor":
        transformer.single_transformer_blocks[0].attn.set_processor(FirstTokens())
    if kind == "scores by hand":
        forward = blocks[0].ff.forward
        blocks[0].ff.forward = lambda x: forward((0.01 * x @ x.mT).softmax(-1) @ x)
    if kind == "past SDPA":
        blocks[1].attn.processor = Bypass()


PLACES = {
    "subclass": "",
    "hook": "transformer_blocks.0",
    "submodule": "transformer_blocks.1.ff",
    "processor": "single_transformer_blocks.0.attn",
    "scores by hand": "transformer_blocks.0.ff",
    "past SDPA": "transformer_blocks.1.attn",
}


def wrong_models():
    """Return the error of each changed transformer. Ignore the warnings about foreign code."""
    errors = {}
    for kind in PLACES:
        heartbeat()
        transformer = as_class(Subclass) if kind == "subclass" else flux_transformer()
        transformer.load_state_dict(flux_transformer().state_dict())
        is_checked = kind == "past SDPA"
        options = {"mesh": cpu_mesh(2, 1)} if is_checked else {"mesh": cpu_mesh(1, 2), "text": "shard"}
        change(transformer, kind)
        parallelize_transformer(transformer, verify=True, **options)
        skipped = mock.patch.object(AttentionCheck, "run", unchecked) if is_checked else nullcontext()
        with warnings.catch_warnings(), torch.no_grad(), skipped, pytest.raises(RuntimeError) as caught:
            warnings.simplefilter("ignore", ParallelWarning)
            transformer(**flux_inputs(37, 15))
        errors[kind] = str(caught.value)
    return errors


def test_code_that_needs_all_tokens_raises_with_the_first_module(rank_pool):
    for errors in rank_pool.run(wrong_models, 2):
        for kind, error in errors.items():
            assert "2 ranks differs by" in error, kind
            assert PLACES[kind] in error, kind


COMPILED_AND_CACHED = [(False, False), (False, True), (True, False), (True, True)]


def use_cache(pipe):
    return apply_cache_on_pipe(pipe, residual_diff_threshold=10.0, max_consecutive_hits=1)


def verified_pipelines():
    return [verified_pipeline(*options) for options in COMPILED_AND_CACHED]


def verified_pipeline(compiled, cached):
    pipe = parallelize_pipe(flux_pipe(shared_parts=False), mesh=cpu_mesh(1, 2), verify=True)
    if cached:
        use_cache(pipe)
    if compiled:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    with logged() as texts:
        outs = [pipe(**{**flux_call(), "num_inference_steps": 4}).images for _ in range(2)]
    unparallelize_pipe(pipe)
    module = getattr(pipe.transformer, "_orig_mod", pipe.transformer)
    assert cached or type(module) is FluxTransformer2DModel
    return outs, texts


def test_pipeline_is_verified_once_compiled_and_cached(rank_pool):
    pipes = flux_pipe(), use_cache(flux_pipe())
    expected = [pipe(**{**flux_call(), "num_inference_steps": 4}).images for pipe in pipes]
    for rank, results in enumerate(rank_pool.run(verified_pipelines, 2)):
        for (compiled, cached), (outs, texts) in zip(COMPILED_AND_CACHED, results, strict=True):
            assert all(relative_error(out, expected[cached]) < 1e-4 for out in outs), (compiled, cached)
            assert len(texts) == (1 if rank == 0 else 0)


def short_of_memory():
    return [short_of_memory_on(rank) for rank in (0, 1)]


def short_of_memory_on(rank):
    transformer = flux_transformer()

    def allocate(module, args):
        if args[0].shape[1] == 13 and dist.get_rank() == rank:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    transformer.x_embedder.register_forward_pre_hook(allocate)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), verify=True)
    with torch.no_grad(), pytest.warns(ParallelWarning, match="1 of 2 ranks"):
        out = transformer(**flux_inputs(13, 5)).sample
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return out, transformer(**flux_inputs(13, 5)).sample


def test_missing_memory_is_said_once_on_every_rank(rank_pool):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for results in rank_pool.run(short_of_memory, 2):
        assert all(relative_error(out, expected) < 1e-5 for outs in results for out in outs)


def compiled_by_the_user():
    before = torch.compile(flux_transformer(), backend="eager", fullgraph=True)
    parallelize_transformer(before, mesh=cpu_mesh(1, 2), verify=True)
    after = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2), verify=True)
    with torch.no_grad(), logged() as texts:
        out = before(**flux_inputs(13, 5)).sample
        with pytest.raises(RuntimeError, match="verify=True"):
            torch.compile(after, backend="eager", fullgraph=True)(**flux_inputs(13, 5))
    return out, texts


def test_compiled_transformer_is_verified_or_refused(rank_pool):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for rank, (out, texts) in enumerate(rank_pool.run(compiled_by_the_user, 2)):
        assert relative_error(out, expected) < 1e-5
        assert len(texts) == (1 if rank == 0 else 0)


def verify_models(names):
    texts = {}
    for name in names:
        heartbeat()
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2), verify=True)
        with logged() as of_model:
            call(transformer, name, SIZES[0])
        texts[name] = len(of_model)
    return texts


# These models have key caches among their arguments, heads per rank, rows, masks, or sixteen bits.
VERIFIED_MODELS = ["wan", "anyflow far", "sana", "hunyuan", "mochi", "ltx", "qwen-image, masked"]


@pytest.mark.parametrize("names", [VERIFIED_MODELS, pytest.param(list(MODELS), marks=pytest.mark.long)], ids=len)
def test_models_of_other_structures_are_verified_without_a_warning(rank_pool, names):
    texts, *_ = rank_pool.run(verify_models, 2, names)
    assert texts == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"comm_dtype": torch.int8}, "comm_dtype"), ({"backend": "triton-int8"}, "backend"), ({"verify": 1}, "verify")],
)
def test_verify_excludes_options_that_approximate(options, named):
    with pytest.raises((ValueError, TypeError), match=named):
        parallelize_pipe(flux_pipe(), **{"verify": True, **options})


class Generating(nn.Module):
    """A layer that draws random numbers in its forward."""

    def forward(self, x):
        return x + torch.randn(1) * 0


def keeps_random_state():
    transformer = flux_transformer()
    transformer.transformer_blocks[0].ff = nn.Sequential(transformer.transformer_blocks[0].ff, Generating())
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), verify=True)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.no_grad():
            transformer(**flux_inputs(13, 5))
        draws.append(torch.randn(3))
    return draws


def test_random_numbers_are_those_of_an_unverified_call(rank_pool):
    for first, second in rank_pool.run(keeps_random_state, 2):
        assert torch.equal(first, second)
