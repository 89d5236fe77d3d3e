"""A cache with quantized or sharded weights, compiled as a whole or by blocks."""

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    cache_report,
    parallelize_pipe,
    parallelize_transformer,
)
from tests.adapters.test_pipelines import build, generate
from tests.cache.test_graph import Counter
from tests.cache.test_sizes import ALTERNATE, MODELS, run_sizes
from tests.tiny import cpu_mesh, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*cache ")]
SIZES = [(1, 6, 6), (2, 8, 6)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def build_int8(name):
    transformer = MODELS[name].build()
    quantize_(transformer, Int8WeightOnlyConfig())
    return transformer


def run_int8(name, order, backend="aot_eager", ranks=1, sizes=SIZES):
    """Return the outputs of a cached int8 transformer in full graphs, and the number of graphs."""
    counter = Counter(backend)
    transformer = MODELS[name].build() if order == "cache first" else build_int8(name)
    if ranks > 1:
        parallelize_transformer(transformer, mesh=cpu_mesh(1, ranks))
    apply_cache_on_transformer(transformer, **ALTERNATE)
    if order == "cache first":
        quantize_(transformer, Int8WeightOnlyConfig())
    compiled = torch.compile(transformer, fullgraph=True, backend=counter)
    return run_sizes(transformer, name, sizes, compiled), len(counter.graphs)


def check_int8(outputs, graphs, name, sizes=SIZES):
    unmodified = build_int8(name)
    with torch.no_grad():
        inputs = [MODELS[name].inputs(*size) for size in sizes]
        expected = [unmodified(**values, return_dict=False)[0] for values in inputs]
    eager = run_sizes(apply_cache_on_transformer(build_int8(name), **ALTERNATE), name, sizes)
    assert graphs <= 2 * len(sizes)
    for output, of_eager in zip(outputs, eager, strict=True):
        assert relative_error(output, of_eager) < 1e-5
    # The first step of each size is computed.
    for output, of_unmodified in zip(outputs[:: len(outputs) // len(sizes)], expected, strict=True):
        assert relative_error(output, of_unmodified) < 1e-5


# Blocks run in one branch of the graph, or each in its own. Tracing int8 weights takes long.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "order", "sizes"),
    [
        ("sd3", "cache first", SIZES),
        *[(name, "int8 first", SIZES) for name in ("sd3", "wan", "flux", "wan vace")],
    ],
)
def test_int8_weights_are_exact_in_a_graph(name, order, sizes):
    check_int8(*run_int8(name, order, sizes=sizes), name, sizes)


@pytest.mark.long
def test_int8_weights_are_exact_with_inductor():
    check_int8(*run_int8("sd3", "int8 first", "inductor"), "sd3")


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_int8_weights_are_exact_in_graph_on_two_ranks(rank_pool, name):
    for outputs, graphs in rank_pool.run(run_int8, 2, name, "int8 first", ranks=2):
        check_int8(outputs, graphs, name)


def compile_blocks(name, order):
    """Return the latents of a pipeline whose blocks are compiled after ``order`` was applied, and the number of skipped
    steps.
    """
    pipe, counter = build(name), Counter("eager")
    for step in order:
        if step == "cache":
            apply_cache_on_pipe(pipe, **ALTERNATE)
        else:
            mesh = cpu_mesh(1, 2)
            parallelize_pipe(pipe, mesh=mesh, weights="fsdp" if step == "fsdp" else None)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=counter)
    latents = generate(pipe, name, num_inference_steps=4)
    return latents, len(counter.graphs), cache_report(pipe).hits


@pytest.mark.long
@pytest.mark.parametrize(
    "order",
    [
        ("fsdp", "cache"),
        *[
            pytest.param(x, marks=pytest.mark.long)
            for x in (("cache", "fsdp"), ("parallel", "cache"), ("cache", "parallel"))
        ],
    ],
)
def test_repeated_blocks_of_cached_transformer_compile_in_any_order(rank_pool, order):
    name = "qwen-image"
    expected = apply_cache_on_pipe(build(name), **ALTERNATE)
    latents = generate(expected, name, num_inference_steps=4)
    for out, graphs, hits in rank_pool.run(compile_blocks, 2, name, order):
        assert graphs > 0
        assert hits == cache_report(expected).hits > 0
        assert relative_error(out, latents) < 1e-5
