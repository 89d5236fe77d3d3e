"""Attention backends, wire dtypes and schedules of a parallel pipeline. Libraries are stand-ins by the formula."""

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, parallelize_transformer, unparallelize_pipe
from para_core.attention import local
from para_core.attention.schedule import AttentionSchedule
from para_core.cache.branches import Branches
from tests.adapters.test_pipelines import build, generate
from tests.attention.fake_libraries import libraries_installed
from tests.kernels.attention_cases import by_formula
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error


def small_pipe():
    return flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))


def draw(pipe, **options):
    return pipe(**flux_call(**{"num_inference_steps": 5, **options})).images


def draw_in_every_way(ring, ulysses):
    mesh, pipe, scales = cpu_mesh(ring, ulysses), small_pipe(), []

    def by_hand(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
        scales.append(scale)
        out, lse = by_formula(query, key, value, scale=scale)
        return out.to(query.dtype), lse.float()

    expected = draw(pipe)
    outs = [draw(parallelize_pipe(pipe, mesh=mesh, attn_func=by_hand))]
    calls = len(scales)
    for options, allowed in (({"backend": "math"}, {"math"}), ({}, {None})):
        with mock.patch.object(local, "check_backend", wraps=local.check_backend) as check_backend:
            outs.append(draw(parallelize_pipe(pipe, mesh=mesh, **options)))
        named = {call.args[0] for call in check_backend.call_args_list}
        assert named <= allowed and (named or not options)
    assert max(relative_error(out, expected) for out in outs) < 1e-5
    # On one rank nothing is sent, so it changes nothing.
    error = relative_error(draw(parallelize_pipe(pipe, mesh=mesh, comm_dtype=torch.int8)), expected)
    assert 1e-5 < error < 0.05 if ring * ulysses > 1 else error == 0
    assert torch.equal(draw(unparallelize_pipe(pipe)), expected)
    assert len(scales) == calls > 0


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (1, 1)])
def test_pipeline_uses_the_requested_backend_until_undone(rank_pool, mesh):
    rank_pool.run(draw_in_every_way, torch.Size(mesh).numel(), *mesh)


def sage_schedule():
    return AttentionSchedule("sage", first=1, last=2)


def calls_by_step(pipe, calls, draw):
    """Return the output of ``draw``, and the number of calls of the library in each step."""
    totals = [calls.total()]
    out = draw(pipe, callback_on_step_end=lambda *_: {"": totals.append(calls.total())})
    return out, [after - before for before, after in pairwise(totals)]


def test_one_rank_follows_the_schedule_until_undone():
    pipe, expected = small_pipe(), draw(small_pipe())
    with libraries_installed() as calls:
        assert parallelize_pipe(pipe, backend=sage_schedule()) is pipe
        out, steps = calls_by_step(pipe, calls, draw)
        assert relative_error(out, expected) < 1e-5
        assert steps == [0, 2, 2, 0, 0]
        assert calls_by_step(pipe, calls, partial(draw, num_inference_steps=3))[1] == [0, 0, 0]
        assert calls_by_step(parallelize_pipe(pipe, backend="math"), calls, draw)[1] == [0] * 5
        # Another scheduler is counted by its own steps.
        parallelize_pipe(pipe, backend=sage_schedule())
        with mock.patch.object(pipe, "scheduler", FlowMatchEulerDiscreteScheduler(shift=1.0)):
            assert calls_by_step(pipe, calls, partial(draw, num_inference_steps=6))[1] == [0, 2, 2, 2, 0, 0]
        parallelize_pipe(pipe, backend=AttentionSchedule("sage", first=0, last=0))
        assert calls_by_step(pipe, calls, draw)[1] == [2] * 5
        # Calls in a callback, and after the generation, whose last step is approximate, are exact.
        total = calls.total()
        draw(pipe, callback_on_step_end=lambda *_: {"": pipe.transformer(**flux_inputs(5, 3))})
        with torch.no_grad():
            pipe.transformer(**flux_inputs(5, 3))
        assert calls.total() == total + 2 * 5
        assert torch.equal(draw(unparallelize_pipe(pipe)), expected)
        assert calls_by_step(pipe, calls, draw)[1] == [0] * 5


@pytest.mark.parametrize("name", ["skyreels v2, forcing"], ids=["SkyReelsV2Transformer3DModel"])
def test_a_schedule_counts_calls_per_branch_if_copies_of_the_scheduler_step(name):
    pipe, totals = build(name), [0]
    with libraries_installed() as calls:
        parallelize_pipe(pipe, backend=sage_schedule())
        pipe.transformer.register_forward_hook(lambda *_: totals.append(calls.total()))
        for name_of in (Branches.name_of, lambda *_: None):
            with mock.patch.object(Branches, "name_of", name_of):
                generate(pipe, name, num_inference_steps=5)
    # There are two branches in each step of two sections. Calls of unknown branches are exact.
    assert [after - before for before, after in pairwise(totals)] == 2 * [0, 0, 2, 2, 2, 2, 0, 0, 0, 0] + 20 * [0]


def follow_schedule(ring, ulysses):
    a_step = 2 * ring  # Each of two layers merges a block of each ring rank.
    plain, draw_wan = draw(small_pipe()), partial(generate, name="wan 2.2", num_inference_steps=5)
    expected = draw_wan(build("wan 2.2"))
    with libraries_installed() as calls:
        pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(ring, ulysses), backend=sage_schedule())
        out, steps = calls_by_step(pipe, calls, draw)
        assert relative_error(out, plain) < 1e-5
        assert steps == [0, a_step, a_step, 0, 0]
        # In the skipped steps 1 to 3 only block 0 attends.
        apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, forecast_order=0, max_consecutive_hits=3)
        assert calls_by_step(pipe, calls, draw)[1] == [0, ring, ring, 0, 0]
        heartbeat()
        # Each guided step calls the model twice, and a second transformer computes the last steps.
        pipe = parallelize_pipe(build("wan 2.2"), mesh=cpu_mesh(ring, ulysses), backend=sage_schedule())
        out, steps = calls_by_step(pipe, calls, draw_wan)
        assert relative_error(out, expected) < 1e-5
        assert steps[1] == steps[2] > 0 == steps[0] == steps[3] == steps[4]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_ranks_follow_the_schedule(rank_pool, mesh):
    rank_pool.run(follow_schedule, 2, *mesh)


def test_a_schedule_needs_its_library_and_a_pipeline():
    pipe, expected = small_pipe(), draw(small_pipe())
    with libraries_installed():
        with pytest.raises(ValueError, match=r"AttentionSchedule.*parallelize_pipe"):
            parallelize_transformer(pipe.transformer, backend=sage_schedule())
        parallelize_pipe(pipe, backend=sage_schedule())
        pipe.transformer.transformer_blocks[0].attn.processor._attention_backend = "flash"
        with pytest.raises(ValueError, match=r"'flash' in 'transformer_blocks\.0\.attn'.*AttentionSchedule"):
            draw(pipe)
        pipe.transformer.transformer_blocks[0].attn.processor._attention_backend = None
        unparallelize_pipe(pipe)
    assert torch.equal(draw(pipe), expected)
