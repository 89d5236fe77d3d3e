"""An attention schedule chooses the backend of each step, together with caches, guidance, compilation and other
schedulers.

The library of the middle steps is a stand-in that computes by the formula. So each output equals that of the unmodified
pipeline, and the stand-in's calls show the steps.
"""

from functools import partial
from itertools import pairwise
from math import ceil
from unittest import mock

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from para_core.adapters import (
    AttentionSchedule,
    KeptKeys,
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
)
from tests.adapters.test_pipelines import build, generate
from tests.attention.fake_libraries import libraries_installed
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error

SAGE = AttentionSchedule("sage", first=1, last=2)


def small_pipe():
    return flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))


def calls_by_step(pipe, calls, draw):
    """Return the output of ``draw``, and the number of calls of the library in each step."""
    totals = [calls.total()]

    def callback(*_):
        totals.append(calls.total())
        return {}

    out = draw(pipe, callback_on_step_end=callback)
    return out, [after - before for before, after in pairwise(totals)]


def draw(pipe, **options):
    return pipe(**flux_call(**{"num_inference_steps": 5, **options})).images


def test_one_rank_follows_the_schedule_until_undone():
    pipe, expected = small_pipe(), draw(small_pipe())
    with libraries_installed() as calls:
        assert parallelize_pipe(pipe, backend=SAGE) is pipe
        for _ in range(2):
            out, steps = calls_by_step(pipe, calls, draw)
            assert relative_error(out, expected) < 1e-5
            assert steps == [0, 2, 2, 0, 0]
        _, steps = calls_by_step(pipe, calls, partial(draw, num_inference_steps=3))
        assert steps == [0, 0, 0]
        _, steps = calls_by_step(parallelize_pipe(pipe, backend="math"), calls, draw)
        assert steps == [0] * 5
        # Another scheduler is counted by its own steps.
        parallelize_pipe(pipe, backend=SAGE)
        scheduler, pipe.scheduler = pipe.scheduler, FlowMatchEulerDiscreteScheduler(shift=1.0)
        assert calls_by_step(pipe, calls, partial(draw, num_inference_steps=6))[1] == [0, 2, 2, 2, 0, 0]
        pipe.scheduler = scheduler
        parallelize_pipe(pipe, backend=AttentionSchedule("sage", first=0, last=0))
        assert calls_by_step(pipe, calls, draw)[1] == [2] * 5
        # The last step is approximate, and no callback follows it. A call after the generation is exact.
        draw(pipe)
        total = calls.total()
        with torch.no_grad():
            pipe.transformer(**flux_inputs(5, 3))
        assert calls.total() == total
        assert torch.equal(draw(unparallelize_pipe(pipe)), expected)
        assert calls_by_step(pipe, calls, draw)[1] == [0] * 5


def scheduled(ring, ulysses):
    outputs = {}
    with libraries_installed() as calls:
        pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(ring, ulysses), backend=SAGE)
        outputs["plain"] = calls_by_step(pipe, calls, draw)
        # In the skipped steps 1 to 3 only block 0 attends.
        apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, forecast_order=0, max_consecutive_hits=3)
        outputs["cached"] = calls_by_step(pipe, calls, draw)
        heartbeat()
        # Each guided step calls the model twice, and a second transformer computes the last steps.
        pipe = parallelize_pipe(build("wan 2.2"), mesh=cpu_mesh(ring, ulysses), backend=SAGE)
        outputs["wan"] = calls_by_step(pipe, calls, partial(generate, name="wan 2.2", num_inference_steps=5))
    return outputs


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_ranks_follow_the_schedule(rank_pool, ring, ulysses):
    plain, wan = draw(small_pipe()), generate(build("wan 2.2"), "wan 2.2", num_inference_steps=5)
    for outputs in rank_pool.run(scheduled, 2, ring, ulysses):
        out, steps = outputs["plain"]
        a_step = 2 * ring  # Each of two layers merges a block of each ring rank.
        assert relative_error(out, plain) < 1e-5
        assert steps == [0, a_step, a_step, 0, 0]
        assert outputs["cached"][1] == [0, ring, ring, 0, 0]
        out, steps = outputs["wan"]
        assert relative_error(out, wan) < 1e-5
        assert steps[1] == steps[2] > 0
        assert steps[0] == steps[3] == steps[4] == 0


def compiled():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    with libraries_installed() as calls:
        pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(2, 1), backend=SAGE)
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
        pipe.transformer = torch.compile(pipe.transformer, backend=count, fullgraph=True)
        generations = [(*calls_by_step(pipe, calls, draw), len(graphs)) for _ in range(2)]
        exact = parallelize_pipe(small_pipe(), mesh=cpu_mesh(2, 1))
        graphs.clear()
        apply_cache_on_pipe(exact, residual_diff_threshold=0.0)
        exact.transformer = torch.compile(exact.transformer, backend=count, fullgraph=True)
        draw(exact)
    return generations, len(graphs)


@pytest.mark.long
def test_a_schedule_compiles_each_graph_once_more(rank_pool):
    expected = draw(small_pipe())
    for generations, graphs in rank_pool.run(compiled, 2):
        for out, steps, compilations in generations:
            assert relative_error(out, expected) < 1e-5
            assert steps == [0, 4, 4, 0, 0]
            assert compilations == graphs + 1


def test_a_callback_sees_exact_attention():
    pipe, counts = small_pipe(), []
    with libraries_installed() as calls:
        parallelize_pipe(pipe, backend=AttentionSchedule("sage", first=0, last=0))

        def callback(pipe, index, time, kwargs):
            before = calls.total()
            pipe.transformer(**flux_inputs(63, 4))
            counts.append(calls.total() - before)
            return {}

        draw(pipe, num_inference_steps=2, callback_on_step_end=callback)
    assert counts == [0, 0]


def test_a_pipe_in_a_callback_follows_its_own_schedule():
    pipe = small_pipe()
    other = flux_pipe(transformer=pipe.transformer)
    inner, outer = [], []
    with libraries_installed() as calls:
        parallelize_pipe(pipe, backend=AttentionSchedule("sage", first=0, last=0))
        parallelize_pipe(other, backend=AttentionSchedule("sage", first=1, last=0))

        def callback(pipe, index, time, kwargs):
            outer.append(calls.total())
            if index == 0:
                inner.append(calls_by_step(other, calls, partial(draw, num_inference_steps=2))[1])
                outer[0] = calls.total()
            return {}

        draw(pipe, num_inference_steps=3, callback_on_step_end=callback)
    assert inner == [[0, 2]]
    assert [after - before for before, after in pairwise(outer)] == [2, 2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttentionSchedule("fast"), ValueError, "'fast'.*triton-int8"),
        (lambda: AttentionSchedule("sage", exact="triton-int8"), ValueError, "'triton-int8'.*flash"),
        (lambda: AttentionSchedule("sage", first=-1), ValueError, r"first.*-1"),
        (lambda: AttentionSchedule("sage", last=1.5), TypeError, r"last.*1\.5"),
        (lambda: AttentionSchedule("sage", last=True), TypeError, r"last.*True"),
        (lambda: KeptKeys(0, 64), ValueError, "share is"),
        (lambda: KeptKeys(1.5, 64), ValueError, "share is"),
        (lambda: KeptKeys(True, 64), ValueError, "share is"),
        (lambda: KeptKeys(0.5, 0), ValueError, "window is"),
        (lambda: KeptKeys(0.5, True), ValueError, "window is"),
        (lambda: parallelize_pipe(build("anyflow far"), backend=HALF), ValueError, r"KeptKeys\(share=0.5.*transformer"),
    ],
)
def test_bad_schedules_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_schedule_needs_its_library_and_a_pipeline():
    pipe, expected = small_pipe(), draw(small_pipe())
    with pytest.raises(ImportError, match="sageattention"):
        parallelize_pipe(pipe, backend=SAGE)
    with libraries_installed():
        with pytest.raises(ValueError, match=r"AttentionSchedule.*parallelize_pipe"):
            parallelize_transformer(pipe.transformer, backend=SAGE)
        parallelize_pipe(pipe, backend=SAGE)
        pipe.transformer.transformer_blocks[0].attn.processor._attention_backend = "flash"
        with pytest.raises(ValueError, match=r"'flash' in 'transformer_blocks\.0\.attn'.*AttentionSchedule"):
            draw(pipe)
        pipe.transformer.transformer_blocks[0].attn.processor._attention_backend = None
        unparallelize_pipe(pipe)
        with mock.patch.object(pipe, "scheduler", None), pytest.raises(ValueError, match="scheduler"):
            parallelize_pipe(pipe, backend=SAGE)
    assert torch.equal(draw(pipe), expected)


def with_other_schedules():
    with libraries_installed():
        schedule = AttentionSchedule("sage", last=torch.distributed.get_rank())
        with pytest.raises(ValueError, match=r"rank 0 .*'last': 0.*rank 1 .*'last': 1"):
            parallelize_pipe(small_pipe(), mesh=cpu_mesh(1, 2), backend=schedule)


def test_ranks_with_other_schedules_are_told(rank_pool):
    rank_pool.run(with_other_schedules, 2)


class KeysByFormula(TorchFunctionMode):
    """The attention of a FLUX transformer in which each head keeps the keys with the largest weights in some steps.

    It counts the transformer's calls, one for each step. All queries are observed.
    """

    def __init__(self, transformer, middle, share):
        super().__init__()
        self.middle, self.share, self.step, self.inside = middle, share, -1, False
        transformer.register_forward_pre_hook(self.begin)
        transformer.register_forward_hook(self.end)

    def begin(self, *_):
        self.step, self.inside = self.step + 1, True

    def end(self, *_):
        self.inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention or not self.inside or self.step not in self.middle:
            return func(*args, **(kwargs or {}))
        query, key, value = args if args else (kwargs[name] for name in ("query", "key", "value"))
        votes = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).sum(-2)
        kept = votes.topk(ceil(self.share * key.shape[-2])).indices
        mask = torch.zeros_like(votes, dtype=torch.bool).scatter(-1, kept, True)
        return func(query, key, value, mask[:, :, None])


HALF = AttentionSchedule(KeptKeys(0.5, window=10_000), first=1, last=2)


def draw_by_formula(middle):
    pipe = small_pipe()
    with KeysByFormula(pipe.transformer, middle, 0.5):
        return draw(pipe)


def with_kept_keys(ring, ulysses, compiled=False):
    pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(ring, ulysses), backend=HALF)
    if compiled:
        pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    return draw(pipe), draw(unparallelize_pipe(pipe))


def test_kept_keys_in_the_middle_are_those_of_the_formula():
    exact, expected = draw_by_formula([]), draw_by_formula([1, 2])
    assert relative_error(expected, exact) > 1e-3
    pipe = parallelize_pipe(small_pipe(), backend=HALF)
    for _ in range(2):
        assert relative_error(draw(pipe), expected) < 1e-5
    assert torch.equal(draw(unparallelize_pipe(pipe)), exact)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses", "compiled"), [(2, 1, False), (1, 2, False), (1, 2, True), (2, 1, True)])
def test_kept_keys_on_ranks_are_those_of_the_formula(rank_pool, ring, ulysses, compiled):
    exact, expected = draw_by_formula([]), draw_by_formula([1, 2])
    for out, undone in rank_pool.run(with_kept_keys, 2, ring, ulysses, compiled):
        assert relative_error(out, expected) < 1e-5
        assert torch.equal(undone, exact)
