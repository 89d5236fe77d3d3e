"""The state of a cache: its content, owner and lifetime."""

import gc
import re
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.callbacks import PipelineCallback

from para_core import apply_cache, model_cache_report, remove_cache, reset_cache
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    cache_report,
    remove_cache_from_pipe,
)
from para_core.adapters.cache.generation import caching_of
from para_core.cache.apply import cache_options, require_cache
from tests.cache.scripted import ADAPTER, BLOCKS, IN_TWO_STAGES, Pipe, Scripted, verdicts
from tests.tiny import flux_call, flux_pipe, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*cache ")
ALMOST_SAME = [1.0, 1.01, 1.02, 1.03]


def cached(pipe=None, **options):
    return apply_cache_on_pipe(
        Pipe() if pipe is None else pipe, **{"residual_diff_threshold": 0.1, "adapter": ADAPTER, **options}
    )


def held(pipe):
    return [x for state in caching_of(pipe).caches["transformer"].states.values() for x in state.tensors()]


def test_each_generation_starts_empty_and_frees_its_state():
    pipe = cached()
    for _ in range(2):
        pipe(ALMOST_SAME)
        assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "hit"]
        assert held(pipe) == []


def test_an_exception_leaves_nothing_behind():
    pipe = cached()
    with pytest.raises(ArithmeticError):
        pipe(ALMOST_SAME, fail_at=2)
    assert held(pipe) == []
    pipe(ALMOST_SAME)
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "hit"]


def test_retry_after_late_exception_is_no_hit():
    """Check a retry after a late exception. The failed call replaced the first-block residual, but not those of the
    other blocks.
    """

    class Failing(Scripted):
        fails = False

        def forward(self, *args, **kwargs):
            def fail(block, args):
                raise ArithmeticError("as asked")

            handle = self.late[-1].register_forward_pre_hook(fail) if self.fails else None
            try:
                return super().forward(*args, **kwargs)
            finally:
                if handle is not None:
                    handle.remove()

    model = apply_cache(Failing(), BLOCKS, residual_diff_threshold=0.1)
    inputs = torch.ones(1, 6, 8), torch.zeros(1, 3, 8)
    with torch.no_grad():
        model(*inputs, torch.tensor([1.0, 10.0]))
        model.fails = True
        with pytest.raises(ArithmeticError):
            model(*inputs, torch.tensor([2.0, 50.0]))
        model.fails = False
        retried = model(*inputs, torch.tensor([2.0, 50.0]))
        assert torch.equal(retried, Scripted()(*inputs, torch.tensor([2.0, 50.0])))
    assert verdicts(model_cache_report(model)) == ["warmup", "warmup"]


@pytest.mark.parametrize("named", [True, False])
def test_branches_have_separate_states(named):
    pipe = cached(Pipe(named=named))
    pipe({"cond": [1.0, 1.01, 1.5], "uncond": [7.0, 8.0, 8.01]}, {"cond": [10.0] * 3, "uncond": [20.0] * 3})
    names = ["cond", "uncond"] if named else ["branch 0", "branch 1"]
    assert verdicts(cache_report(pipe), names[0]) == ["warmup", "hit", "miss"]
    assert verdicts(cache_report(pipe), names[1]) == ["warmup", "miss", "hit"]


def test_unnamed_branches_are_identified_by_text():
    """Check branches without names while guidance is off at some steps, or text tensors are new at each step."""
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    x = torch.ones(1, 6, 8)
    text = {"a": torch.zeros(1, 3, 8), "b": torch.ones(1, 3, 8)}
    added = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 6.0])}
    with torch.no_grad():
        for name in "abaabba":
            model(x.clone(), text[name].clone(), added[name])
    report = model_cache_report(model)
    assert "".join(row.branch[-1] for row in report.rows) == "0100110"
    assert verdicts(report) == ["warmup", "warmup", *["hit"] * 5]


class Waits(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.equal, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("anew", [False, True])
def test_unnamed_branches_wait_at_most_once(anew):
    # Warmup steps need no decision, so the host waits only to identify the branches.
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1, warmup_steps=100)
    texts = [torch.full((1, 3, 8), float(i)) for i in range(3)]
    x, added, counts = torch.ones(1, 6, 8), torch.tensor([1.0, 2.0]), []
    with torch.no_grad():
        for _ in range(3):
            for text in texts:
                with Waits() as waits:
                    model(x, text.clone() if anew else text, added)
                counts.append(waits.count)
    assert [row.branch for row in model_cache_report(model).rows] == ["branch 0", "branch 1", "branch 2"] * 3
    assert set(counts[3:]) == {1 if anew else 0}


def held_bytes(model):
    """Return the bytes of all tensors that the cache of ``model`` holds now, over all CFG branches."""
    cache = require_cache(model)
    states = {id(state): state for state in (*cache.states.values(), cache.state)}
    return sum(x.numel() * x.element_size() for state in states.values() for x in state.tensors())


def test_changing_text_warns_once_and_keeps_nothing():
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    x, added = torch.ones(1, 6, 8), torch.tensor([1.0, 2.0])
    expected = Scripted()(x, torch.zeros(1, 3, 8), added)
    for generation in range(2):
        reset_cache(model)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for step in range(12):
                out = model(x, torch.full((1, 3, 8), float(step)), added)
                assert torch.equal(out, expected)
                # There are at most three branches, and the formula of the docs holds for each.
                assert held_bytes(model) <= 4 * 4 * (2 * 6 * 8 + 3 * 8)
        assert held_bytes(model) == 0
        messages = [str(warning.message) for warning in caught]
        if generation == 0:
            (message,) = messages
            assert re.search(r"encoder_hidden_states .*Scripted ", message)
            assert "cache_context(name)" in message
        else:
            assert messages == []


@pytest.mark.parametrize("change", ["tokens", "batch", "dtype"])
def test_change_of_size_or_dtype_starts_empty(change):
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    sizes = {"tokens": (1, 7, 8), "batch": (2, 6, 8), "dtype": (1, 6, 8)}
    dtype = torch.float64 if change == "dtype" else torch.float32
    added = torch.tensor([1.0, 2.0])
    with torch.no_grad():
        model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), added)
        model(torch.ones(sizes[change], dtype=dtype), torch.zeros(1, 3, 8), added)
    assert verdicts(model_cache_report(model)) == ["warmup", "warmup"]


def test_pipes_sharing_a_transformer_are_separate():
    shared = Scripted()
    a, b, plain = cached(Pipe(shared)), cached(Pipe(shared), residual_diff_threshold=0.001), Pipe(shared)
    expected = Pipe()(ALMOST_SAME)
    for _ in range(2):
        a(ALMOST_SAME)
        b(ALMOST_SAME)
        assert verdicts(cache_report(a)) == ["warmup", "hit", "hit", "hit"]
        assert verdicts(cache_report(b)) == ["warmup", "miss", "miss", "miss"]
        for out, other in zip(plain(ALMOST_SAME), expected, strict=True):
            assert torch.equal(out, other)
    remove_cache_from_pipe(a)
    b(ALMOST_SAME)
    assert verdicts(cache_report(b)) == ["warmup", "miss", "miss", "miss"]
    remove_cache_from_pipe(b)
    assert type(shared) is Scripted


def test_pipe_with_own_blocks_on_shared_transformer_is_exact():
    shared = Scripted()
    a, b = cached(Pipe(shared)), cached(Pipe(shared), first_blocks=2, last_blocks=1)
    for _ in range(2):
        shared.counts()
        a([1.0, 1.01])
        assert shared.counts() == [2, 1, 1, 1]
        b([1.0, 1.01])
        assert shared.counts() == [2, 2, 1, 2]
    remove_cache_from_pipe(b)
    a([1.0, 1.01])
    assert shared.counts() == [2, 1, 1, 1]


def test_second_thread_in_a_pipe_raises():
    entered, leave = threading.Event(), threading.Event()

    class Waiting(Scripted):
        def forward(self, *args, **kwargs):
            entered.set()
            assert leave.wait(30)
            return super().forward(*args, **kwargs)

    shared = Waiting()
    adapter_of = {"adapter": ADAPTER, "residual_diff_threshold": 0.1}
    a, b = cached(Pipe(shared)), cached(Pipe(shared))
    thread = threading.Thread(target=a, args=(ALMOST_SAME,))
    thread.start()
    assert entered.wait(30)
    with pytest.raises(RuntimeError, match=r"pipeline .*thread"):
        a(ALMOST_SAME)
    with pytest.raises(RuntimeError, match=r"Waiting .*thread"):
        b(ALMOST_SAME)
    other = apply_cache_on_pipe(Pipe(), **adapter_of)
    other(ALMOST_SAME)
    assert verdicts(cache_report(other)) == ["warmup", "hit", "hit", "hit"]
    leave.set()
    thread.join(30)
    assert verdicts(cache_report(a)) == ["warmup", "hit", "hit", "hit"]


class Callback(PipelineCallback):
    """A callback class of diffusers, which checks the type."""

    tensor_inputs = ("latents",)

    def __init__(self, run):
        super().__init__(cutoff_step_ratio=1.0)
        self.run = run

    def callback_fn(self, pipe, step, timestep, tensors):
        return self.run(pipe, step, timestep, tensors)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["function", "partial", "callback of diffusers", "thread"])
@pytest.mark.parametrize("cached_too", [False, True])
def test_nested_pipe_in_callback_equals_one_alone(kind, cached_too):
    a = flux_pipe()
    b = FluxPipeline(**{**a.components, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)})
    b.set_progress_bar_config(disable=True)
    options = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 2}
    call = {"num_inference_steps": 5, "prompt": "a blue square"}
    if cached_too:
        apply_cache_on_pipe(b, **options)
    expected_b = b(**flux_call(**call)).images
    apply_cache_on_pipe(a, **options)
    expected_a = a(**flux_call(num_inference_steps=5)).images
    generated = []

    def generate_b():
        generated.append(b(**flux_call(**call)).images)

    def generate_other(pipe, step, timestep, tensors):
        if step in (1, 3):
            if kind == "thread":
                thread = threading.Thread(target=generate_b)
                thread.start()
                thread.join(60)
            else:
                generate_b()
        return tensors

    callback = {"callback of diffusers": Callback, "partial": partial}.get(kind, lambda f: f)(generate_other)
    out = a(**flux_call(num_inference_steps=5), callback_on_step_end=callback).images
    assert len(generated) == 2
    for other in generated:
        assert torch.equal(other, expected_b)
    assert torch.equal(out, expected_a)
    assert cache_report(a).hits == 3


def test_uncached_pipe_in_another_thread_equals_one_alone():
    shared, inside, leave = Scripted(), threading.Event(), threading.Event()
    a, b = cached(Pipe(shared)), Pipe(shared)
    expected = Pipe()([3.0, 7.0])
    thread = threading.Thread(target=a, args=(ALMOST_SAME,))

    def wait(block, args):
        if threading.get_ident() == thread.ident and not leave.is_set():
            inside.set()
            assert leave.wait(30)

    shared.early[1].register_forward_pre_hook(wait)
    thread.start()
    assert inside.wait(30)
    outputs = b([3.0, 7.0])
    leave.set()
    thread.join(30)
    for out, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(out, wanted)
    assert verdicts(cache_report(a)) == ["warmup", "hit", "hit", "hit"]


def test_reapplying_takes_effect_and_removal_restores_classes():
    pipe = Pipe()
    classes = [type(module) for module in pipe.transformer.modules()]
    expected = pipe(ALMOST_SAME)
    for threshold, wanted in ((0.1, "hit"), (0.0, "miss"), (0.1, "hit")):
        cached(pipe, residual_diff_threshold=threshold)
        pipe(ALMOST_SAME)
        assert verdicts(cache_report(pipe)) == ["warmup", wanted, wanted, wanted]
    remove_cache_from_pipe(pipe)
    assert [type(module) for module in pipe.transformer.modules()] == classes
    assert type(pipe) is Pipe
    assert type(pipe.scheduler).__module__.startswith("diffusers")
    for out, other in zip(pipe(ALMOST_SAME), expected, strict=True):
        assert torch.equal(out, other)
    remove_cache_from_pipe(pipe)  # Nothing is left to remove.


def test_two_caches_of_one_transformer_are_refused():
    pipe = flux_pipe()
    transformer = pipe.transformer
    apply_cache_on_transformer(transformer, residual_diff_threshold=1e9)
    with pytest.raises(ValueError, match=r"pipe\.transformer.*remove_cache\(pipe\.transformer\)"):
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.1)
    assert type(pipe) is FluxPipeline
    remove_cache(transformer)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.1)
    cached = pipe(**flux_call()).images
    apply_cache_on_transformer(transformer, residual_diff_threshold=1e9)
    with pytest.raises(ValueError, match=r"pipe\.transformer.*remove_cache\(pipe\.transformer\)"):
        pipe(**flux_call())
    reset_cache(transformer)
    assert cache_options(transformer).residual_diff_threshold == 1e9
    remove_cache(transformer)
    assert torch.equal(pipe(**flux_call()).images, cached)
    remove_cache_from_pipe(pipe)
    assert type(transformer) is FluxTransformer2DModel


def test_replaced_transformer_raises():
    pipe = cached()
    pipe.transformer = Scripted()
    with pytest.raises(RuntimeError, match=r"pipe\.transformer .*cache"):
        pipe(ALMOST_SAME)


@pytest.mark.parametrize(("blocks", "order"), [(BLOCKS, 0), (BLOCKS, 2), (IN_TWO_STAGES, 0)])
def test_memory_equals_the_formula(blocks, order):
    """Compare the memory of a branch with the formula: the first-block residual, and order + 1 residuals of each stage
    and stream.
    """
    sizes = []

    class Measured(Scripted):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            sizes.append(sum(x.numel() * x.element_size() for x in held(pipe)))
            return out

    adapter = type(ADAPTER)(transformer="Measured", pipelines="measured", blocks=blocks)
    pipe = cached(Pipe(Measured()), adapter=adapter, forecast_order=order, warmup_steps=4, downsample=2)
    pipe([1.0] * 5)
    hidden, text = 6 * 8 * 4, 3 * 8 * 4
    assert sizes[-1] == hidden // 2 + len(blocks.groups) * (order + 1) * (hidden + text)


def test_nothing_is_left_after_removal():
    pipe = cached()
    pipe(ALMOST_SAME)
    cache = weakref.ref(caching_of(pipe).caches["transformer"])
    remove_cache_from_pipe(pipe)
    gc.collect()
    assert cache() is None


def test_stored_residuals_hold_no_autograd_graph():
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    out = model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]))
    assert out.requires_grad
    skipped = model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]))
    assert verdicts(model_cache_report(model)) == ["warmup", "hit"]
    skipped.sum().backward()  # The gradient flows through the first block only.
    remove_cache(model)


def test_own_model_is_reset_by_hand():
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    inputs = torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0])
    with torch.no_grad():
        alone = Scripted()(*inputs)
        assert torch.equal(model(*inputs), alone)
        model(*inputs)
        reset_cache(model)
        assert torch.equal(model(*inputs), alone)
    assert verdicts(model_cache_report(model)) == ["warmup"]
    remove_cache(model)
    assert type(model) is Scripted
    with pytest.raises(ValueError, match=r"Scripted .*apply_cache\("):
        reset_cache(model)


def test_host_waits_at_most_once_per_step():
    waits = []
    waiting = {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.cpu,
        torch.equal,
    }

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            # Weights of a forecast are computed from times in float64, and never on a device.
            if func in waiting and not (args[0].dtype == torch.float64 and args[0].device.type == "cpu"):
                waits.append(func)
            return func(*args, **(kwargs or {}))

    class Watched(Scripted):
        def forward(self, *args, **kwargs):
            with Watch():
                waits.append("call")
                return super().forward(*args, **kwargs)

    pipe = cached(
        Pipe(Watched()),
        adapter=type(ADAPTER)(transformer="Watched", pipelines="watched", blocks=BLOCKS),
        warmup_steps=2,
        max_consecutive_hits=1,
        always_compute_last=True,
    )
    pipe([1.0] * 6)
    assert verdicts(cache_report(pipe)) == ["warmup", "warmup", "hit", "limit", "hit", "schedule"]
    steps = " ".join("call" if wait == "call" else "wait" for wait in waits).split("call")[1:]
    assert [step.split() for step in steps] == [[], [], ["wait"], [], ["wait"], []]


def test_offload_lora_and_bfloat16_go_with_it():
    pipe = flux_pipe(FluxPipeline)
    call = {"num_inference_steps": 4, "output_type": "latent"}
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=1)
    expected = pipe(**flux_call(**call)).images
    pipe.enable_model_cpu_offload(device="cpu")
    assert relative_error(pipe(**flux_call(**call)).images, expected) < 1e-6
    pipe.remove_all_hooks()
    pipe.transformer.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert relative_error(pipe(**flux_call(**call)).images, expected) < 1e-6
    assert cache_report(pipe).hits == 2

    half = flux_pipe(FluxPipeline, shared_parts=False).to(torch.bfloat16)
    apply_cache_on_pipe(half, residual_diff_threshold=1e9, max_consecutive_hits=1)
    generated = half(**flux_call(**call)).images
    assert generated.dtype == torch.bfloat16
    assert cache_report(half).hits == 2
