"""A cached model is one full graph, and neither a hit nor another generation or cache recompiles it."""

import gc
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import BlockGroup, CachedBlocks, UnifiedAttnMode, apply_cache, model_cache_report, remove_cache
from para_core.adapters import cache_report, remove_cache_from_pipe
from para_core.cache.apply import require_cache, reset_cache
from para_core.cache.cond import _PlainWeights, find_wrapped_linears
from tests.cache.scripted import BLOCKS, IN_TWO_STAGES, STREAMS, Pipe, Scripted, cached, call_model, verdicts
from tests.cache.test_steps import TEXT, X, build_video, noise
from tests.tiny import cpu_mesh, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*cache ")]
CHANGING = [1.0, 1.05, 1.09, 1.12, 1.13]
EXPECTED = ["warmup", "hit", "hit", "miss", "hit"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compile_transformer(pipe, counter, in_place):
    if in_place:
        pipe.transformer.compile(fullgraph=True, backend=counter)
    else:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)


def test_cache_has_two_graphs_for_any_threshold():
    pipe, counter = Pipe(), CompileCounterWithBackend("aot_eager")
    compile_transformer(cached(pipe), counter, in_place=True)
    # One graph fills the state, and another one uses it. From the second number of tokens on, it is symbolic.
    for size, graphs in (((1, 6, 8), 2), ((1, 6, 8), 2), ((1, 7, 8), 4), ((1, 9, 8), 4)):
        for out, wanted in zip(pipe(CHANGING, size=size), cached()(CHANGING, size=size), strict=True):
            assert relative_error(out, wanted) < 1e-6
        assert verdicts(cache_report(pipe)) == EXPECTED
        assert len(counter.graphs) == graphs
    cached(pipe, residual_diff_threshold=0.0)
    pipe(CHANGING)
    assert verdicts(cache_report(pipe)) == ["warmup"] + ["miss"] * 4
    assert len(counter.graphs) == 4


@pytest.mark.parametrize("in_place", [True, False])
def test_code_between_blocks_runs_as_in_eager(in_place):
    eager = apply_cache(Scripted(), IN_TWO_STAGES, residual_diff_threshold=0.1)
    expected = call_model(eager, *CHANGING, between=torch.tensor(0.5))
    pipe = Pipe(apply_cache(Scripted(), IN_TWO_STAGES, residual_diff_threshold=0.1))
    counter = CompileCounterWithBackend("eager")
    compile_transformer(pipe, counter, in_place)
    for out, wanted in zip(call_model(pipe.transformer, *CHANGING, between=torch.tensor(0.5)), expected, strict=True):
        assert relative_error(out, wanted) < 1e-6
    assert len(counter.graphs) == 2
    # The stored residual contains the contributions between the blocks, and the text adds 5.
    assert expected[1].mean().item() == pytest.approx(1 + 1.05 + 10 + 5 * 0.5 + 5, rel=1e-5)
    # A graph cannot skip them all at once if nothing says that there may be something between them.
    blocks = CachedBlocks((BlockGroup(("early", "late"), STREAMS, chained=True),))
    model = apply_cache(Scripted(), blocks, residual_diff_threshold=0.1)
    model.compile(fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"BlockGroup\(between=\.\.\.\)"):
        call_model(model, 1.0, 1.0, between=torch.tensor(0.5))


@pytest.mark.parametrize(("of_a_pipe", "in_place"), [(True, True), (False, False)])
def test_next_cache_of_a_compiled_model_gives_back_its_classes(of_a_pipe, in_place):
    pipe, counter, classes = Pipe(), CompileCounterWithBackend("eager"), []
    model = pipe.transformer
    compile_transformer(pipe, counter, in_place)
    expected = call_model(Scripted(), 1.0, 1.05)
    for _ in range(4):
        if of_a_pipe:
            assert max(map(relative_error, cached(pipe)(CHANGING), cached()(CHANGING))) < 1e-6
            assert verdicts(cache_report(pipe)) == EXPECTED
        else:
            apply_cache(model, BLOCKS, residual_diff_threshold=0.1)
            assert relative_error(call_model(pipe.transformer, 1.0, 1.05)[1], expected[1]) > 1e-3
        # A private class equals its original, so compare identities.
        classes.append([id(type(module)) for module in model.modules()])
        (remove_cache_from_pipe if of_a_pipe else remove_cache)(pipe if of_a_pipe else model)
        assert type(model) is Scripted
        assert classes[-1] == classes[0] != [id(type(module)) for module in model.modules()]
        gc.collect()
        for out, wanted in zip(call_model(pipe.transformer, 1.0, 1.05), expected, strict=True):
            assert torch.equal(out, wanted)
    assert len(counter.graphs) == 3
    # Nothing keeps the model alive.
    alive = weakref.ref(model)
    del model, pipe
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_linear_of_a_quantized_weight_takes_arguments_by_name():
    layer, x = torch.nn.Linear(16, 4), noise(3, 16)
    quantize_(layer, Int8WeightOnlyConfig())
    expected = layer(x)
    layers = find_wrapped_linears(layer)
    with _PlainWeights(layers):
        out = torch.nn.functional.linear(x, weight=layer.weight, bias=layer.bias)
    assert torch.equal(out, expected) and find_wrapped_linears(layer, layers)[0] is layers[0]


def run_own_model(compiled, threshold=0.3, parallel=True):
    torch._dynamo.reset()
    model, mesh = build_video(), cpu_mesh(1, 2) if parallel else None
    quantize_(model.blocks, Int8WeightOnlyConfig())
    blocks = CachedBlocks((BlockGroup(("blocks",), ("x",), "x", chained=True),), conditions=("text",))
    # In eager code, the mode around the call gives the sequence of these tokens.
    apply_cache(model, blocks, residual_diff_threshold=threshold, mesh=mesh if compiled else None)
    called = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    steps = [(X, 1.0), (X + 0.01, 0.99), (X + 3 * noise(1, 7, 16, seed=5), 0.98), (X, 0.97)]
    calls = [(x, TEXT, torch.tensor([time])) for x, time in steps]
    with torch.no_grad():
        if mesh is None:
            return [called(*call) for call in calls]
        with UnifiedAttnMode(mesh) as cp:
            return [cp.gather(called(cp.shard(x, dim=1), *others), dim=1) for x, *others in calls]


@pytest.mark.parametrize("compiled", [False, True])
def test_own_quantized_model_under_a_mode_is_cached(rank_pool, compiled):
    expected = run_own_model(compiled=False, parallel=False)
    alone = run_own_model(compiled=False, threshold=0.0, parallel=False)
    # The second step is skipped, and the third is computed.
    assert not torch.equal(expected[1], alone[1])
    assert torch.equal(expected[2], alone[2])
    for outputs in rank_pool.run(run_own_model, 2, compiled=compiled):
        for out, wanted in zip(outputs, expected, strict=True):
            assert relative_error(out, wanted) < 1e-5


class Replayed(CompileCounterWithBackend):
    """A backend whose graphs return the same memory in each run, as CUDA graphs do, and overwrite it first."""

    def __init__(self):
        super().__init__("aot_eager")
        self.outputs = []

    def __call__(self, graph, inputs, **_):
        run, memory = super().__call__(graph, inputs), []

        def replay(*args):
            # Like a CUDA graph, it reads inputs that are outside its memory.
            args = [x.clone() if any(share(x, y) for y in memory) else x for x in args]
            for x in memory:
                x.fill_(torch.nan if x.is_floating_point() else -1)
            results = run(*args)
            if not memory:
                memory.extend([x.detach().clone() for x in results if isinstance(x, torch.Tensor)])
                self.outputs.extend(memory)
            kept = iter(memory)
            return tuple([next(kept).copy_(x) if isinstance(x, torch.Tensor) else x for x in results])

        return replay


def share(x, y):
    return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def run_branches(model, check=lambda: None):
    """Return the outputs of two generations with two alternating branches."""
    outputs = []
    for _ in range(2):
        reset_cache(model)
        for values in zip(CHANGING, [5.0, 5.3, 5.4, 9.0, 9.1], strict=True):
            for name, value in zip(("cond", "uncond"), values, strict=True):
                with model.cache_context(name):
                    outputs += [x.clone() for x in call_model(model, value)]
                check()
    return outputs


def test_state_is_not_kept_in_memory_that_a_replay_overwrites():
    expected = run_branches(apply_cache(Scripted(), IN_TWO_STAGES, residual_diff_threshold=0.1))
    model, backend = apply_cache(Scripted(), IN_TWO_STAGES, residual_diff_threshold=0.1), Replayed()
    model.compile(fullgraph=True, backend=backend)
    numbers = []

    def check_no_shared_memory():
        cache = require_cache(model)
        states = list(cache.states.values())
        held = [x for state in states for x in state.tensors()]
        held += [state.decider._numbers for state in states if state.decider is not None]
        held += [x for outcome in cache.outcomes for x in outcome if isinstance(x, torch.Tensor)]
        assert not any(share(x, y) for x in held for y in backend.outputs)
        numbers.append(len(held))

    outputs = run_branches(model, check_no_shared_memory)
    assert max(numbers) > 8
    assert max(relative_error(x, y) for x, y in zip(outputs, expected, strict=True)) < 1e-6
    report = verdicts(model_cache_report(model))
    assert report.count("warmup") == 2 and "hit" in report and "miss" in report
