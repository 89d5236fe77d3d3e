"""verify=True reports equal outputs. Other outputs raise on every rank, and the error names the first module that
differs.
"""

import logging
import warnings
from contextlib import contextmanager
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
    """Call a transformer twice at each of two sizes, and once more after its code has changed."""
    transformer = flux_transformer()
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


def wrong(kind):
    """Return the error of a FLUX transformer whose code uses its number of tokens. Ignore the warnings about foreign
    code.
    """
    transformer = as_class(Subclass) if kind == "subclass" else flux_transformer()
    if kind == "subclass":
        transformer.load_state_dict(flux_transformer().state_dict())
    if kind == "hook":
        transformer.transformer_blocks[0].register_forward_hook(
            lambda module, args, output: tuple(x - x.mean(1, keepdim=True) for x in output)
        )
    if kind == "submodule":
        transformer.transformer_blocks[1].ff = Mixing(transformer.transformer_blocks[1].ff)
    if kind == "processor":
        transformer.single_transformer_blocks[0].attn.set_processor(FirstTokens())
    if kind == "scores by hand":
        forward = transformer.transformer_blocks[0].ff.forward
        transformer.transformer_blocks[0].ff.forward = lambda x: forward((0.01 * x @ x.mT).softmax(-1) @ x)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), text="shard", verify=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ParallelWarning)
        try:
            transformer(**flux_inputs(37, 15))
        except RuntimeError as error:
            return str(error)


PLACES = {
    "subclass": "",
    "hook": "transformer_blocks.0",
    "submodule": "transformer_blocks.1.ff",
    "processor": "single_transformer_blocks.0.attn",
    "scores by hand": "transformer_blocks.0.ff",
}


@pytest.mark.parametrize("kind", list(PLACES))
def test_code_that_needs_all_tokens_raises_with_the_first_module(rank_pool, kind):
    for error in rank_pool.run(wrong, 2, kind):
        assert error is not None and "2 ranks differs by" in error
        assert PLACES[kind] in error


def bypassing():
    """Call a transformer whose attention bypasses SDPA, with that check switched off, so that only the comparison can
    find it.
    """
    transformer = flux_transformer()
    parallelize_transformer(transformer, mesh=cpu_mesh(2, 1), verify=True)

    def unchecked(check, planned, run, module, args, kwargs):
        planned.intercepted[0] = True
        return run(module, *args, **kwargs)

    transformer.transformer_blocks[1].attn.processor = Bypass()
    with mock.patch.object(AttentionCheck, "run", unchecked), torch.no_grad():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ParallelWarning)
                transformer(**flux_inputs(13, 5))
        except RuntimeError as error:
            return str(error)


class Bypass(HandMade):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        tokens = torch.cat([encoder_hidden_states, hidden_states], 1)
        out = (tokens @ tokens.mT / tokens.shape[-1] ** 0.5).softmax(-1) @ tokens
        text = encoder_hidden_states.shape[1]
        return out[:, text:], out[:, :text]


def test_attention_past_sdpa_is_found_by_the_comparison_too(rank_pool):
    for error in rank_pool.run(bypassing, 2):
        assert error is not None and "transformer_blocks.1.attn" in error


def verified_pipeline(compiled, cached):
    pipe = flux_pipe()
    counter = Counter(pipe.transformer, 63 // 3 * 3)
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), verify=True)
    if cached:
        apply_cache_on_pipe(pipe, residual_diff_threshold=10.0, max_consecutive_hits=1)
    if compiled:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    del counter
    with logged() as texts:
        outs = [pipe(**{**flux_call(), "num_inference_steps": 4}).images for _ in range(2)]
    unparallelize_pipe(pipe)
    module = getattr(pipe.transformer, "_orig_mod", pipe.transformer)
    assert cached or type(module) is FluxTransformer2DModel
    return outs, texts


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_pipeline_is_verified_once_compiled_and_cached(rank_pool, compiled, cached):
    pipe = flux_pipe()
    if cached:
        apply_cache_on_pipe(pipe, residual_diff_threshold=10.0, max_consecutive_hits=1)
    expected = pipe(**{**flux_call(), "num_inference_steps": 4}).images
    for rank, (outs, texts) in enumerate(rank_pool.run(verified_pipeline, 2, compiled, cached)):
        assert all(relative_error(out, expected) < 1e-4 for out in outs)
        assert len(texts) == (1 if rank == 0 else 0)


def short_of_memory(rank):
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


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_memory_is_said_once_on_every_rank(rank_pool, rank):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for outs in rank_pool.run(short_of_memory, 2, rank):
        assert all(relative_error(out, expected) < 1e-5 for out in outs)


def compiled_by_the_user(when):
    transformer = flux_transformer()
    if when == "before":
        transformer = torch.compile(transformer, backend="eager", fullgraph=True)
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), verify=True)
    else:
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), verify=True)
        transformer = torch.compile(transformer, backend="eager", fullgraph=True)
    with torch.no_grad(), logged() as texts:
        try:
            return transformer(**flux_inputs(13, 5)).sample, texts
        except RuntimeError as error:
            return str(error), texts


def test_compiled_transformer_is_verified_or_refused(rank_pool):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for rank, (out, texts) in enumerate(rank_pool.run(compiled_by_the_user, 2, "before")):
        assert relative_error(out, expected) < 1e-5
        assert len(texts) == (1 if rank == 0 else 0)
    for out, texts in rank_pool.run(compiled_by_the_user, 2, "after"):
        assert "verify=True" in out and texts == []


def verify_models(names):
    texts = {}
    for name in names:
        heartbeat()
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2), verify=True)
        with logged() as of_model:
            call(transformer, name, SIZES[0])
        texts[name] = of_model
    return texts


# These models have key caches among their arguments, heads per rank, rows, masks, or sixteen bits.
VERIFIED_MODELS = ["wan", "anyflow far", "sana", "hunyuan", "mochi", "ltx", "qwen-image, masked"]


def test_models_of_other_structures_are_verified(rank_pool):
    texts, *_ = rank_pool.run(verify_models, 2, VERIFIED_MODELS)
    assert [len(of_model) for of_model in texts.values()] == [1] * len(VERIFIED_MODELS)


@pytest.mark.long
def test_every_transformer_is_verified_without_a_warning(rank_pool):
    texts, *_ = rank_pool.run(verify_models, 2, list(MODELS))
    assert {name for name, of_model in texts.items() if len(of_model) != 1} == set()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"comm_dtype": torch.int8}, "comm_dtype"), ({"backend": "triton-int8"}, "backend"), ({"verify": 1}, "verify")],
)
def test_verify_excludes_options_that_approximate(options, named):
    with pytest.raises((ValueError, TypeError), match=named):
        parallelize_pipe(flux_pipe(), **{"verify": True, **options})


def restore_classes(ring):
    """Return the classes of all modules before, while and after a model is verified."""
    transformer = flux_transformer()
    before = [type(part) for part in transformer.modules()]
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), verify=True)
    with torch.no_grad():
        transformer(**flux_inputs(13, 5))
    unparallelize_transformer(transformer)
    return [type(part) is cls for part, cls in zip(transformer.modules(), before, strict=True)]


def test_removal_restores_every_class(rank_pool):
    for same in rank_pool.run(restore_classes, 2, 1):
        assert all(same)


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
