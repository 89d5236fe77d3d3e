"""verify=True reports equal outputs. Others raise on every rank, and the error names the first module that differs."""

import logging
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from para_core import ParallelWarning
from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)
from para_core.adapters.models.flux import FLUX
from para_core.adapters.models.shared.constructors import samples_in_dim_0
from para_core.cache.attachment import host_of
from para_core.cache.decision import DecisionOutcome, Verdict
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.verify import verification
from tests.modes.outcomes import logged
from tests.plans.test_foreign_code import FirstTokens, Subclass, as_class
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


class Generating(nn.Module):
    """A layer that draws random numbers in its forward."""

    def forward(self, x):
        return x + torch.randn(1) * 0


def verify_sizes(ring, ulysses):
    """Call a transformer twice at each of two sizes, and once more after its code has changed. Then remove the plan.
    Return the calls of its first block so far, on whole inputs and on parts, the next random number, and the output.
    """
    transformer, results = flux_transformer(), []
    first, second = transformer.transformer_blocks
    first.ff = nn.Sequential(first.ff, Generating())
    classes, calls = [type(part) for part in transformer.modules()], {True: 0, False: 0}

    def count(module, args, kwargs):
        calls[kwargs["hidden_states"].shape[1] == 13] += 1

    def call(image):
        torch.manual_seed(0)
        out = transformer(**flux_inputs(image, 5)).sample
        results.append((calls[True], calls[False], torch.randn(()).item(), out))

    first.register_forward_pre_hook(count, with_kwargs=True)
    parallelize_transformer(transformer, mesh=cpu_mesh(ring, ulysses), verify=True)
    with torch.no_grad(), logged(verification.__name__, logging.INFO) as texts:
        for image in (13, 13, 9, 9):
            call(image)
        second.register_forward_hook(lambda *_: None)
        call(13)
        unparallelize_transformer(transformer)
        call(13)
    assert all(type(part) is cls for part, cls in zip(transformer.modules(), classes, strict=True))
    return results, texts


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_each_size_costs_one_more_call_and_new_code_another(rank_pool, mesh):
    with torch.no_grad():
        expected = {image: flux_transformer()(**flux_inputs(image, 5)).sample for image in (13, 9)}
    for rank, (results, texts) in enumerate(rank_pool.run(verify_sizes, 2, *mesh)):
        whole, parts, draws, outs = zip(*results, strict=True)
        assert list(zip(whole, parts, strict=True)) == [(1, 1), (1, 2), (1, 4), (1, 5), (2, 6), (3, 6)]
        assert len(set(draws)) == 1, "a verified call draws other random numbers"
        for out, image in zip(outs, (13, 13, 9, 9, 13, 13), strict=True):
            assert relative_error(out, expected[image]) < 1e-5
        assert len(texts) == (3 if rank == 0 else 0)


def hook(transformer):
    first = transformer.transformer_blocks[0]
    first.register_forward_hook(lambda module, args, output: [x - x.mean(1, keepdim=True) for x in output])


def processor(transformer):
    transformer.single_transformer_blocks[0].attn.set_processor(FirstTokens())


# Changes by which a transformer uses its number of tokens, and the first module that differs.
PLACES = {Subclass: "", hook: "transformer_blocks.0", processor: "single_transformer_blocks.0.attn"}
OF_SAMPLES = replace(FLUX.plan, batched=samples_in_dim_0("pooled_projections"), common=("img_ids", "txt_ids"))


def wrong_models(batch):
    """Return the error of each changed transformer. Ignore the warnings about foreign code."""
    errors, options = {}, {"text": "shard", "adapter": replace(FLUX, plan=OF_SAMPLES)}
    for change in PLACES:
        heartbeat()
        transformer = as_class(Subclass) if change is Subclass else flux_transformer()
        transformer.load_state_dict(flux_transformer().state_dict())
        if change is not Subclass:
            change(transformer)
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2, batch=batch), verify=True, **options)
        with warnings.catch_warnings(), torch.no_grad(), pytest.raises(RuntimeError) as caught:
            warnings.simplefilter("ignore", ParallelWarning)
            transformer(**flux_inputs(37, 15, batch=2))
        errors[change.__name__] = str(caught.value)
    return errors


@pytest.mark.parametrize("batch", [1, 2])
def test_code_that_needs_all_tokens_raises_with_the_first_module(rank_pool, batch):
    for errors in rank_pool.run(wrong_models, 2 * batch, batch):
        for change, place in PLACES.items():
            assert "2 ranks differs by" in errors[change.__name__]
            assert f"first difference is in {place or 'the model itself'} (" in errors[change.__name__]


def use_cache(pipe):
    return apply_cache_on_pipe(pipe, residual_diff_threshold=10.0, max_consecutive_hits=1)


def verified_pipeline():
    pipe = use_cache(parallelize_pipe(flux_pipe(shared_parts=False), mesh=cpu_mesh(1, 2), verify=True))
    # Another pipeline with this transformer has a cache whose last call was a skip.
    other = mock.Mock(outcome=DecisionOutcome(None, Verdict.HIT, 1, 1))
    host_of(pipe.transformer).owners.add(other)
    with logged(verification.__name__, logging.INFO) as texts:
        return [pipe(**{**flux_call(), "num_inference_steps": 4}).images for _ in range(2)], texts


def test_cached_pipeline_is_verified_once(rank_pool):
    expected = use_cache(flux_pipe())(**{**flux_call(), "num_inference_steps": 4}).images
    for rank, (outs, texts) in enumerate(rank_pool.run(verified_pipeline, 2)):
        assert all(relative_error(out, expected) < 1e-4 for out in outs)
        assert len(texts) == (1 if rank == 0 else 0)


def short_of_memory():
    """Return the outputs of two calls each, for which rank 0 lacks memory in the model, then rank 1 to compare."""
    outs, pinned = [], RuntimeError("CUDA error: out of memory")
    for function, failure in (("empty_during", torch.OutOfMemoryError()), ("largest_error", pinned)):
        transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2), verify=True)
        error = failure if dist.get_rank() == (function == "largest_error") else None
        allocate = mock.patch.object(verification, function, wraps=getattr(verification, function), side_effect=error)
        with allocate, torch.no_grad(), pytest.warns(ParallelWarning, match="1 of 2 ranks"):
            outs.append(transformer(**flux_inputs(13, 5)).sample)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            outs.append(transformer(**flux_inputs(13, 5)).sample)
    return outs


def test_missing_memory_is_said_once_on_every_rank(rank_pool):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for results in rank_pool.run(short_of_memory, 2):
        assert all(relative_error(out, expected) < 1e-5 for out in results)


def test_ranks_decide_by_the_largest_tolerance():
    of_ranks = [{"error": 1e-3, "tolerance": tolerance} for tolerance in (1e-4, 5e-2)]
    with mock.patch.object(verification, "exchange", return_value=of_ranks):
        verification.Verification()._conclude(nn.Identity(), mock.Mock(), mock.Mock(), mock.Mock(tolerance=1e-4))
    for device in ("cpu", "meta"):  # Offloaded weights may be on the meta device.
        coarse = nn.Linear(1, 1, device=device, dtype=torch.bfloat16)
        assert verification._tolerance_for(coarse, [torch.ones(1)]) == 5e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert verification._tolerance_for(nn.Linear(1, 1, device="meta"), [torch.ones(1)]) == 5e-2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [None, parallelize_pipe, unparallelize_pipe])
def test_other_settings_end_the_verification(change, compiled):
    pipe = flux_pipe(shared_parts=False)
    if compiled:
        pipe.transformer = torch.compile(pipe.transformer)
    parallelize_transformer(pipe.transformer, verify=True)
    assert is_filled(pipe.transformer, Slot.VERIFIED)
    change(pipe) if change else parallelize_transformer(pipe.transformer)
    assert not is_filled(pipe.transformer, Slot.VERIFIED)
