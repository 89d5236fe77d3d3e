"""The state of a cache: its content, owner and lifetime."""

import gc
import re
import threading
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
from diffusers.callbacks import PipelineCallback

from para_core import apply_cache, model_cache_report, remove_cache, reset_cache
from para_core.adapters import apply_cache_on_transformer, cache_report, remove_cache_from_pipe
from para_core.adapters.cache.generation import caching_of
from para_core.cache.apply import require_cache
from tests.cache.scripted import ADAPTER, BLOCKS, IN_TWO_STAGES, Pipe, Scripted, Waits, cached, call_model, verdicts

pytestmark = pytest.mark.filterwarnings("ignore:.*cache ")
ALMOST_SAME = [1.0, 1.01, 1.02, 1.03]
HITS = ["warmup", "hit", "hit", "hit"]


def cached_model(model=None, **options):
    return apply_cache(Scripted() if model is None else model, BLOCKS, residual_diff_threshold=0.1, **options)


def held_bytes(cache):
    """Return the bytes of all tensors that a cache holds now, over all CFG branches."""
    states = {id(state): state for state in (*cache.states.values(), cache.state)}
    return sum(x.numel() * x.element_size() for state in states.values() for x in state.tensors())


def equal(outputs, expected):
    return all(torch.equal(out, wanted) for out, wanted in zip(outputs, expected, strict=True))


def test_each_generation_starts_empty_and_frees_its_state():
    pipe = cached()

    def fail(pipe, step, *_):
        if step == 2:
            with pytest.raises(RuntimeError, match=r"pipeline .*thread .*callback"):
                pipe(ALMOST_SAME)
            raise ArithmeticError("as asked")

    for _ in range(2):
        pipe(ALMOST_SAME)
        assert verdicts(cache_report(pipe)) == HITS
        assert held_bytes(caching_of(pipe).caches["transformer"]) == 0
        with pytest.raises(ArithmeticError):
            pipe(ALMOST_SAME, callback=fail)
        assert held_bytes(caching_of(pipe).caches["transformer"]) == 0
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        pipe(ALMOST_SAME)
    assert verdicts(cache_report(pipe)) == HITS


def test_retry_after_late_exception_is_no_hit():
    # The failed call replaced the first-block residual, but not those of the other blocks.
    model = cached_model()
    call_model(model, 1.0)
    handle = model.late[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call_model(model, 2.0)
    handle.remove()
    assert equal(call_model(model, 2.0), call_model(Scripted(), 2.0))
    assert verdicts(model_cache_report(model)) == ["warmup", "warmup"]


@pytest.mark.parametrize("anew", [False, True])
def test_text_identifies_unnamed_branches_with_one_wait(anew):
    # Warmup steps need no decision, so the host waits only to identify the branches.
    model = cached_model(warmup_steps=100)
    texts = {name: torch.full((1, 3, 8), float(name)) for name in "012"}
    x, added, counts = torch.ones(1, 6, 8), torch.tensor([1.0, 2.0]), []
    with torch.no_grad():
        for name in "0120012201":
            with Waits() as waits:
                model(x.clone(), texts[name].clone() if anew else texts[name], added)
            counts.append(waits.count)
    assert "".join(row.branch[-1] for row in model_cache_report(model).rows) == "0120012201"
    assert set(counts[3:]) == {1 if anew else 0}


def test_changing_text_warns_once_and_keeps_nothing():
    model = cached_model()
    x, added = torch.ones(1, 6, 8), torch.tensor([1.0, 2.0])
    for generation in range(2):
        reset_cache(model)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for step in range(12):
                text = torch.full((1, 3, 8), float(step))
                assert torch.equal(model(x, text, added), Scripted()(x, text, added))
                # There are at most three branches, and the formula of the docs holds for each.
                assert held_bytes(require_cache(model)) <= 4 * 4 * (2 * 6 * 8 + 3 * 8)
        assert held_bytes(require_cache(model)) == 0
        assert len(caught) == (generation == 0)
        for warning in caught:
            assert re.search(r"encoder_hidden_states .*Scripted .*cache_context\(name\)", str(warning.message))


@pytest.mark.parametrize(("size", "dtype"), [((1, 7, 8), None), ((2, 6, 8), None), ((1, 6, 8), torch.float64)])
def test_change_of_size_or_dtype_starts_empty(size, dtype):
    model = cached_model()
    call_model(model, 1.0)
    with torch.no_grad():
        model(torch.ones(size, dtype=dtype), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]))
    assert verdicts(model_cache_report(model)) == ["warmup", "warmup"]


def test_pipes_sharing_a_transformer_are_separate():
    shared = Scripted()
    a, b = cached(Pipe(shared)), cached(Pipe(shared), residual_diff_threshold=0.001, first_blocks=2, last_blocks=1)
    for _ in range(2):
        shared.counts()
        a(ALMOST_SAME)
        assert verdicts(cache_report(a)) == HITS
        assert shared.counts() == [4, 1, 1, 1, 1]
        b([1.0, 1.0])
        assert verdicts(cache_report(b)) == ["warmup", "hit"]
        assert shared.counts() == [2, 2, 1, 1, 2]
        assert equal(Pipe(shared)(ALMOST_SAME), Pipe()(ALMOST_SAME))
    remove_cache_from_pipe(a)
    b([1.0, 1.5])
    assert verdicts(cache_report(b)) == ["warmup", "miss"]
    remove_cache_from_pipe(b)
    assert type(shared) is Scripted


def test_second_thread_in_a_pipe_raises_and_others_run_alone():
    entered, leave, shared = threading.Event(), threading.Event(), Scripted()
    # The last one has other hooks, which must not replace those of the running call.
    a, b, c = (cached(Pipe(shared), last_blocks=last) for last in (0, 0, 1))
    outputs = [a(ALMOST_SAME)]
    thread = threading.Thread(target=lambda: outputs.append(a(ALMOST_SAME)))

    def wait(block, args):
        if threading.get_ident() == thread.ident and not leave.is_set():
            entered.set()
            assert leave.wait(30)

    shared.early[1].register_forward_pre_hook(wait)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(RuntimeError, match=r"pipeline .*thread"):
        a(ALMOST_SAME)
    for pipe in (b, c):
        with pytest.raises(RuntimeError, match=r"Scripted .*thread"):
            pipe(ALMOST_SAME)
    assert equal(Pipe(shared)([3.0, 7.0]), Pipe()([3.0, 7.0]))
    leave.set()
    thread.join(30)
    assert verdicts(cache_report(a)) == HITS and equal(*outputs)


class Callback(PipelineCallback):
    """A callback class of diffusers, which checks the type."""

    tensor_inputs = ("latents",)

    def __init__(self, run):
        super().__init__(cutoff_step_ratio=1.0)
        self.run = run

    def callback_fn(self, pipe, step, timestep, tensors):
        return self.run(pipe, step, timestep, tensors)


@pytest.mark.parametrize("kind", ["function", "callback of diffusers", "thread"])
@pytest.mark.parametrize("cached_too", [False, True])
def test_nested_pipe_in_callback_equals_one_alone(kind, cached_too):
    shared, generated = Scripted(), []
    a, b = cached(Pipe(shared)), Pipe(shared)
    if cached_too:
        cached(b, max_consecutive_hits=1)
    expected_a, expected_b = a(ALMOST_SAME), b([7.0, 7.1, 7.2])

    def generate_other(pipe, step, timestep, tensors):
        if step in (1, 3):
            thread = threading.Thread(target=lambda: generated.append(b([7.0, 7.1, 7.2])))
            if kind == "thread":
                thread.start()
                thread.join(60)
            else:
                thread.run()
        return tensors

    callback = Callback(generate_other) if kind == "callback of diffusers" else generate_other
    assert equal(a(ALMOST_SAME, callback=callback), expected_a)
    assert len(generated) == 2
    assert all(equal(outputs, expected_b) for outputs in generated)
    assert verdicts(cache_report(a)) == HITS


def test_reapplying_takes_effect_and_removal_restores_classes():
    pipe = Pipe()
    classes = [type(module) for module in pipe.transformer.modules()]
    expected = pipe(ALMOST_SAME)
    for threshold, wanted in ((0.1, "hit"), (0.0, "miss"), (0.1, "hit")):
        cached(pipe, residual_diff_threshold=threshold)
        pipe(ALMOST_SAME)
        assert verdicts(cache_report(pipe)) == ["warmup", wanted, wanted, wanted]
    cache = weakref.ref(caching_of(pipe).caches["transformer"])
    remove_cache_from_pipe(pipe)
    gc.collect()
    assert cache() is None
    assert [type(module) for module in pipe.transformer.modules()] == classes
    assert type(pipe) is Pipe
    assert type(pipe.scheduler).__module__.startswith("diffusers")
    assert equal(pipe(ALMOST_SAME), expected)
    remove_cache_from_pipe(pipe)  # Nothing is left to remove.
    model = Scripted()
    cached_model(torch.compile(model, backend="eager"))
    assert type(remove_cache(model)) is Scripted


def test_second_cache_or_replaced_transformer_is_refused():
    pipe = Pipe()
    transformer = apply_cache_on_transformer(pipe.transformer, residual_diff_threshold=1e9, adapter=ADAPTER)
    message = r"pipe\.transformer.*remove_cache\(pipe\.transformer\)"
    with pytest.raises(ValueError, match=message):
        cached(pipe)
    assert type(pipe) is Pipe
    remove_cache(transformer)
    expected = cached(pipe)(ALMOST_SAME)
    apply_cache_on_transformer(transformer, residual_diff_threshold=1e9, adapter=ADAPTER)
    with pytest.raises(ValueError, match=message):
        pipe(ALMOST_SAME)
    remove_cache(transformer)
    assert equal(pipe(ALMOST_SAME), expected)
    cached(pipe).transformer = Scripted()
    with pytest.raises(RuntimeError, match=r"pipe\.transformer .*cache"):
        pipe(ALMOST_SAME)


@pytest.mark.parametrize(("blocks", "order"), [(BLOCKS, 0), (BLOCKS, 2), (IN_TWO_STAGES, 0)])
def test_memory_equals_the_formula(blocks, order):
    # A branch has the first-block residual, and order + 1 residuals of each stage and stream.
    adapter = type(ADAPTER)(transformer="Scripted", pipelines="scripted", blocks=blocks)
    pipe, sizes = cached(adapter=adapter, forecast_order=order, warmup_steps=4, downsample=2), []
    pipe([1.0] * 6, callback=lambda *_: sizes.append(held_bytes(caching_of(pipe).caches["transformer"])))
    hidden, text = 6 * 8 * 4, 3 * 8 * 4
    assert sizes[-1] == hidden // 2 + len(blocks.groups) * (order + 1) * (hidden + text)


def test_stored_residuals_hold_no_autograd_graph():
    model = cached_model()
    for _ in range(2):
        out = model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]))
        assert out.requires_grad
    assert verdicts(model_cache_report(model)) == ["warmup", "hit"]
    out.sum().backward()  # The gradient flows through the first block only.


def test_host_waits_at_most_once_per_step():
    counts = []
    for pipe in (Pipe(), cached(warmup_steps=2, max_consecutive_hits=1, always_compute_last=True)):
        counts.append([])
        with Waits() as waits:
            pipe([1.0] * 6, callback=lambda *_, to=counts[-1], waits=waits: to.append(waits.count))
        counts[-1].append(waits.count)
    assert verdicts(cache_report(pipe)) == ["warmup", "warmup", "hit", "limit", "hit", "schedule"]
    plain, with_cache = ([after - before for before, after in pairwise(each)] for each in counts)
    # The cache reads the schedule once, and a comparison.
    assert [x - y for x, y in zip(with_cache, plain, strict=True)] == [1, 0, 1, 0, 1, 0]
