"""A cached model is one full graph, and neither a hit nor another generation recompiles it."""

import copy
import gc

import pytest
import torch
from torch import nn

from para_core import (
    BlockGroup,
    CachedBlocks,
    UnifiedAttnMode,
    apply_cache,
    model_cache_report,
    remove_cache,
    reset_cache,
)
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    parallelize_transformer,
    remove_cache_from_pipe,
)
from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.registry import adapter_for
from para_core.cache.apply import require_cache
from tests.adapters.test_pipelines import build, generate
from tests.cache.scripted import ADAPTER, BLOCKS, IN_TWO_STAGES, Pipe, Scripted, verdicts
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES
from zoo.tiny.transformers.registry import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*cache ")]
CHANGING = [1.0, 1.05, 1.09, 1.12, 1.13]
EXPECTED = ["warmup", "hit", "hit", "miss", "hit"]


class Counter:
    """A backend that records one entry per compilation."""

    def __init__(self, backend="aot_eager"):
        self.graphs = []
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs, **options):
        heartbeat()
        self.graphs.append(graph)
        return self._backend(graph, inputs)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "order",
    [
        "compiled first",
        "in place, later",
        *[pytest.param(order, marks=pytest.mark.long) for order in ("cached first", "in place, first")],
    ],
)
def test_cache_has_two_graphs_for_any_threshold(order):
    pipe, counter = Pipe(), Counter()
    options = {"residual_diff_threshold": 0.1, "adapter": ADAPTER}

    def compile_it():
        if "in place" in order:
            pipe.transformer.compile(fullgraph=True, backend=counter)
        else:
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)

    expected = apply_cache_on_pipe(Pipe(), **options)(CHANGING)
    if "first" in order and order != "cached first":
        compile_it()
        pipe(CHANGING)
        assert len(counter.graphs) == 1
        counter.graphs.clear()
    apply_cache_on_pipe(pipe, **options)
    if order in ("cached first", "in place, later"):
        compile_it()
    for _ in range(2):
        for out, wanted in zip(pipe(CHANGING), expected, strict=True):
            assert relative_error(out, wanted) < 1e-6
        assert verdicts(cache_report(pipe)) == EXPECTED
        # One graph fills the state, and the other one uses it.
        assert len(counter.graphs) == 2
    apply_cache_on_pipe(pipe, **{**options, "residual_diff_threshold": 0.0})
    pipe(CHANGING)
    assert verdicts(cache_report(pipe)) == ["warmup"] + ["miss"] * 4
    assert len(counter.graphs) == 2
    remove_cache_from_pipe(pipe)
    for out, wanted in zip(pipe(CHANGING), Pipe()(CHANGING), strict=True):
        assert relative_error(out, wanted) < 1e-6


@pytest.mark.long
def test_branches_share_graphs():
    pipe, counter = Pipe(), Counter()
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, adapter=ADAPTER)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)
    pipe({"cond": CHANGING, "uncond": [x + 5 for x in CHANGING]})
    assert verdicts(cache_report(pipe), "cond") == EXPECTED
    assert verdicts(cache_report(pipe), "uncond") == ["warmup"] + ["hit"] * 4
    assert len(counter.graphs) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("blocks", "between"),
    [
        (BLOCKS, None),
        (IN_TWO_STAGES, 0.5),
        *[pytest.param(*case, marks=pytest.mark.long) for case in ((BLOCKS, 0.5), (IN_TWO_STAGES, None))],
    ],
)
@pytest.mark.long
def test_code_between_blocks_runs_as_in_eager(blocks, between):
    inputs = torch.ones(1, 6, 8), torch.zeros(1, 3, 8)
    added = [torch.tensor([x, 10 * x]) for x in CHANGING]
    between = None if between is None else torch.tensor(between)

    def run(compiled):
        model = apply_cache(Scripted(), blocks, residual_diff_threshold=0.1)
        counter = Counter()
        called = model
        if compiled:
            # The mode of a call outside the graph decides about the residuals between the blocks.
            model.compile(fullgraph=True, backend=counter)
        with torch.no_grad():
            outputs = [called(inputs[0].clone(), inputs[1], x, between) for x in added]
        reset_cache(model)
        return outputs, len(counter.graphs)

    (eager, _), (compiled, graphs) = run(False), run(True)
    assert graphs == 2
    for out, wanted in zip(compiled, eager, strict=True):
        assert relative_error(out, wanted) < 1e-6
    # The stored residual contains the contributions between the blocks.
    rest = 0.0 if between is None else 4 * between.item()
    assert eager[1].mean().item() == pytest.approx(1 + 1.05 + 10 + rest, rel=1e-5)


@pytest.mark.long
def test_unchained_model_raises_in_graph():
    blocks = CachedBlocks((BlockGroup(("early", "late"), ("encoder_hidden_states", "hidden_states"), chained=True),))
    model = apply_cache(Scripted(), blocks, residual_diff_threshold=0.1)
    model.compile(fullgraph=True, backend="eager")
    inputs = torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]), torch.tensor(0.5)
    with torch.no_grad(), pytest.raises(Exception, match=r"BlockGroup\(between=\.\.\.\)"):
        model(*inputs)
        model(*inputs)


def generate_compiled(name, backend, mesh=None):
    torch._dynamo.reset()
    pipe = build(name)
    options = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
    eager = generate(apply_cache_on_pipe(build(name), **options), name, num_inference_steps=4) if mesh is None else None
    counter = Counter(backend)
    if mesh is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh))
    apply_cache_on_pipe(pipe, **options)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)
    first = generate(pipe, name, num_inference_steps=4)
    graphs = len(counter.graphs)
    second = generate(pipe, name, num_inference_steps=4)
    report = [row.verdict.name for row in cache_report(pipe).rows]
    apply_cache_on_pipe(pipe, **{**options, "residual_diff_threshold": 0.0})
    exact = generate(pipe, name, num_inference_steps=4)
    result = {"graphs": graphs, "later": len(counter.graphs) - graphs, "generated": (first, second), "report": report}
    if mesh is not None:
        return {**result, "exact": exact}
    torch._dynamo.reset()
    pipe, counter = build(name), Counter(backend)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)
    plain = generate(pipe, name, num_inference_steps=4)
    # Some models (Wan Animate) compile two graphs without a cache too.
    return {**result, "exact": exact, "plain": plain, "plain graphs": len(counter.graphs), "eager": eager}


# The first model has two stages. The second has a stream that ends in None.
IN_ONE_GRAPH = ["flux2 klein", "stable diffusion 3"]
# diffusers breaks the graphs of these itself, except for FramePack (docs/cache.md). test_pipelines.py runs their cache
# in eager code, on one device and on two ranks.
NO_GRAPH = {"hunyuan 1.5", "lumina2", "hidream", "framepack"}
# Its two inner pipelines keep the transformer with which they were created, so a compiled one in its place is not
# called.
NOT_CALLED = {"visual cloze"}
# For shelf models only the transformer is compiled (tests/adapters/test_transformers.py).
COMPILED = [
    name for name in PIPELINES if name not in (*SHELF_PIPELINES, *NOT_CALLED) and name.split(",")[0] not in NO_GRAPH
]


@pytest.mark.long  # The default run has one of these on ranks.
@pytest.mark.parametrize("name", COMPILED)
def test_every_pipeline_is_one_graph(name):
    result = generate_compiled(name, "aot_eager")
    # If sizes change within a generation, a plain pipeline has a graph for each size. The first call of a generation
    # adds one graph to each.
    assert result["plain graphs"] < result["graphs"] <= 2 * result["plain graphs"]
    assert result["later"] == 0
    assert relative_error(result["exact"], result["plain"]) < 1e-6
    for generated in result["generated"]:
        assert relative_error(generated, result["eager"]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_inductor_compiles_the_graph(name):
    result = generate_compiled(name, "inductor")
    assert (result["graphs"], result["later"]) == (2, 0)
    assert relative_error(result["exact"], result["plain"]) < 1e-6
    for generated in result["generated"]:
        assert relative_error(generated, result["eager"]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [("wan", "eager"), ("wan", "aot_eager"), ("hunyuan", "aot_eager")],
)
def test_parallel_cached_model_is_one_graph(rank_pool, name, backend):
    expected = generate(
        apply_cache_on_pipe(build(name), residual_diff_threshold=1e9, max_consecutive_hits=1),
        name,
        num_inference_steps=4,
    )
    alone = generate(build(name), name, num_inference_steps=4)
    for result in rank_pool.run(generate_compiled, 2, name=name, backend=backend, mesh=(1, 2)):
        assert (result["graphs"], result["later"]) == (2, 0)
        assert relative_error(result["exact"], alone) < 1e-4
        for generated in result["generated"]:
            assert relative_error(generated, expected) < 1e-4


class SelfAttention(nn.Module):
    def __init__(self, first=False):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, hidden_states):
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.qkv(hidden_states).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return hidden_states + self.out(attended.transpose(1, 2).flatten(2))


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def run_own_model(compiled, mesh=None, threshold=0.3):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = OwnModel(), [torch.randn(1, 7, 16)]
    inputs += [inputs[0] + 0.01, inputs[0] + 3 * torch.randn(1, 7, 16), inputs[0]]
    # In eager code, the mode around the call gives the sequence of these tokens.
    options = {"residual_diff_threshold": threshold, "mesh": mesh if compiled else None}
    apply_cache(model, CachedBlocks((BlockGroup(("blocks",), chained=True),)), **options)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.no_grad():
        if mesh is None:
            return [called(x) for x in inputs]
        with UnifiedAttnMode(mesh) as cp:
            return [cp.gather(called(cp.shard(x, dim=1)), dim=1) for x in inputs]


def run_own_model_on_ranks(compiled):
    return run_own_model(compiled, cpu_mesh(1, 2))


def differences_of_a_transformer_alone(cache_first):
    """Return the differences that the graph of this rank computes."""
    torch._dynamo.reset()
    transformer = MODELS["flux"].build(num_layers=1, num_single_layers=1)
    inputs = MODELS["flux"].inputs(3, 6, 10)
    blocks = adapter_for(transformer).blocks
    if cache_first:
        apply_cache(transformer, blocks, residual_diff_threshold=0.2)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
    if not cache_first:
        apply_cache(transformer, blocks, residual_diff_threshold=0.2)
    compiled = torch.compile(transformer, fullgraph=True, backend="aot_eager")
    differences = []
    with torch.no_grad():
        for step in range(3):
            compiled(**{**inputs, "hidden_states": inputs["hidden_states"] + 0.05 * step})
            differences.append(require_cache(transformer).outcome[0])
    assert torch.backends.mha.get_fastpath_enabled()
    return [float(difference[0]) for difference in differences[1:]]


@pytest.mark.long
@pytest.mark.parametrize("cache_first", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_of_transformer_decide_equally_in_graph(rank_pool, cache_first):
    first, second = rank_pool.run(differences_of_a_transformer_alone, 2, cache_first=cache_first)
    assert first == second
    assert all(difference > 0 for difference in first)


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_own_model_under_a_mode_is_cached(rank_pool, compiled):
    expected = run_own_model(compiled=False)
    alone = run_own_model(compiled=False, threshold=0.0)
    # The second step is skipped, and the third is computed.
    assert not torch.equal(expected[1], alone[1])
    assert torch.equal(expected[2], alone[2])
    for outputs in rank_pool.run(run_own_model_on_ranks, 2, compiled=compiled):
        for out, wanted in zip(outputs, expected, strict=True):
            assert relative_error(out, wanted) < 1e-5


def run_under_a_mode_for_each_step():
    model = OwnModel()
    blocks = CachedBlocks(
        (BlockGroup(("blocks",), chained=True),), modulated=lambda block, arguments: arguments["hidden_states"]
    )
    apply_cache(model, blocks, residual_diff_threshold=0.5, rule="modulated_input")
    mesh = cpu_mesh(1, 2)
    for _ in range(2):
        with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
            model(cp.shard(torch.ones(1, 7, 16), dim=1))
    return verdicts(model_cache_report(model))


def test_skipped_step_in_mode_does_not_warn(rank_pool):
    # Warnings are errors in this test.
    assert rank_pool.run(run_under_a_mode_for_each_step, 2) == [["warmup", "hit"]] * 2


@pytest.mark.long
def test_other_numbers_of_steps_are_no_other_graph():
    pipe, counter = Pipe(), Counter()
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)
    options = {"residual_diff_threshold": 1e9, "adapter": ADAPTER}
    # This is more often than Dynamo compiles one function.
    for number in range(10):
        apply_cache_on_pipe(pipe, **options, warmup_steps=number)
        pipe([1.0] * 12)
        computed = max(number, 1)
        assert verdicts(cache_report(pipe)) == ["warmup"] * computed + ["hit"] * (12 - computed)
        apply_cache_on_pipe(pipe, **options, max_hits=number)
        pipe([1.0] * 12)
        assert verdicts(cache_report(pipe)) == ["warmup", *["hit"] * number, *["limit"] * (11 - number)]
        apply_cache_on_pipe(pipe, **options, compute_steps=[number])
        pipe([1.0] * 12)
        expected = ["warmup", *["masked"] * 11]
        expected[number] = "schedule" if number else "warmup"
        assert verdicts(cache_report(pipe)) == expected
        apply_cache_on_pipe(pipe, **options, max_consecutive_hits=number)
        pipe([1.0] * 12)
        cycle = (["hit"] * number + ["limit"]) * 12
        assert verdicts(cache_report(pipe)) == ["warmup", *cycle[:11]]
    assert len(counter.graphs) == 2


def run_scripted(called, values):
    with torch.no_grad():
        return [called(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([x, 10 * x])) for x in values]


def test_next_cache_of_a_compiled_model_gives_back_its_classes():
    model = Scripted()
    called = torch.compile(model, fullgraph=True, backend="eager")

    def classes_with_cache():
        apply_cache(model, BLOCKS, residual_diff_threshold=0.1)
        run_scripted(called, [1.0, 1.0])
        classes = [type(module) for module in model.modules()]
        remove_cache(model)
        return classes

    before, after = classes_with_cache(), classes_with_cache()
    # A private class equals its original, so compare identities.
    assert [id(cls) for cls in before] == [id(cls) for cls in after]
    assert any(cls is not type(module) for cls, module in zip(before, model.modules(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("of_a_pipe", "in_place"), [(True, False), (False, True), (True, True), (False, False)])
def test_repeated_cache_is_compiled_once(in_place, of_a_pipe):
    pipe, counter = Pipe(), Counter()
    model = pipe.transformer
    if in_place:
        model.compile(fullgraph=True, backend=counter)
    else:
        pipe.transformer = torch.compile(model, fullgraph=True, backend=counter)
    expected = run_scripted(Scripted(), [1.0, 1.05])
    for _ in range(6):
        if of_a_pipe:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, adapter=ADAPTER)
            pipe(CHANGING)
            assert verdicts(cache_report(pipe)) == EXPECTED
            remove_cache_from_pipe(pipe)
        else:
            apply_cache(model, BLOCKS, residual_diff_threshold=0.1)
            cached = run_scripted(pipe.transformer, CHANGING)
            assert relative_error(cached[1], expected[1]) > 1e-3
            remove_cache(model)
        assert type(model) is Scripted
        gc.collect()
        for out, wanted in zip(run_scripted(pipe.transformer, [1.0, 1.05]), expected, strict=True):
            assert torch.equal(out, wanted)
    assert len(counter.graphs) == 3
    copied = copy.deepcopy(model)
    assert apply_cache(copied, BLOCKS, residual_diff_threshold=0.1) is copied
    assert type(model) is Scripted


@pytest.mark.long
def test_blocks_of_framepack_compiled_by_themselves_are_skipped():
    options = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
    expected = generate(apply_cache_on_pipe(build("framepack"), **options), "framepack", num_inference_steps=4)
    pipe = apply_cache_on_pipe(build("framepack"), **options)
    for block in blocks_of(pipe.transformer):
        block.compile(backend="aot_eager", fullgraph=True)
    assert relative_error(generate(pipe, "framepack", num_inference_steps=4), expected) < 1e-6
    assert any(row.hit for row in cache_report(pipe).rows)
