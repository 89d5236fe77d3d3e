"""A transformer that was compiled before or after, whole or by blocks, runs in parallel in full graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error


def compile_whole(pipe, backend):
    pipe.transformer = torch.compile(pipe.transformer, backend=backend, fullgraph=True)


def compile_in_place(pipe, backend):
    pipe.transformer.compile(backend=backend, fullgraph=True)


def compile_blocks(pipe, backend):
    pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)


# Each way of compiling has a number of graphs. By blocks there is one graph for single blocks and there are two for
# double ones, whose strides differ between the first and the second. The unmodified pipe has as many.
WAYS = {"torch.compile": (compile_whole, 1), "in place": (compile_in_place, 1), "blocks": (compile_blocks, 3)}


def small_pipe(way):
    """Return a pipeline with one block of each kind if its blocks are compiled together, which halves compile time."""
    return (
        flux_pipe() if way == "blocks" else flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))
    )


def draw_compiled(way, when, ring, ulysses, then=(), backend="aot_eager"):
    """Return two images with the number of graphs after each, an image on each further mesh, and one after undoing."""
    compile_transformer, _ = WAYS[way]
    counter = CompileCounterWithBackend(backend)
    pipe = small_pipe(way)
    if when == "before":
        compile_transformer(pipe, counter)
    parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses))
    if when == "after":
        compile_transformer(pipe, counter)
    outs = []
    frames = []
    for _ in range(2):
        outs.append(pipe(**flux_call()).images)
        frames.append(counter.frame_count)
    for shape in then:
        parallelize_pipe(pipe, mesh=cpu_mesh(*shape))
        outs.append(pipe(**flux_call()).images)
    if then:
        unparallelize_pipe(pipe)
        outs.append(pipe(**flux_call()).images)
    return outs, frames


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "when", "backend"),
    [
        # tests/adapters/test_attention_options.py covers operators of AOTAutograd in the graph of a pipeline.
        ("torch.compile", "before", "eager"),
        *[pytest.param(way, when, "aot_eager", marks=pytest.mark.long) for way in WAYS for when in ("before", "after")],
    ],
)
def test_two_generations_then_other_mesh_compile_once(rank_pool, way, when, backend):
    expected = small_pipe(way)(**flux_call()).images
    graphs = WAYS[way][1]
    for outs, frames in rank_pool.run(draw_compiled, 2, way, when, 1, 2, then=[(2, 1)], backend=backend):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
        assert frames == [graphs, graphs]


def draw_in_rounds(way, shapes, cached=False):
    """Return the image of each round, parallel and after undoing, and the number of graphs after each round."""
    counter = CompileCounterWithBackend("eager")
    pipe = small_pipe(way)
    WAYS[way][0](pipe, counter)
    meshes = {shape: cpu_mesh(*shape) for shape in shapes}
    outs, frames = [], []
    for shape in shapes:
        parallelize_pipe(pipe, mesh=meshes[shape])
        outs.append(pipe(**flux_call()).images)
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
            outs.append(pipe(**flux_call()).images)
            remove_cache_from_pipe(pipe)
            outs.append(pipe(**flux_call()).images)
        unparallelize_pipe(pipe)
        outs.append(pipe(**flux_call()).images)
        frames.append(counter.frame_count)
    return outs, frames


@pytest.mark.long  # tests/plans/test_plan.py has a small model.
@pytest.mark.parametrize(("way", "cached"), [("in place", False), ("in place", True), ("torch.compile", True)])
def test_second_set_up_with_equal_settings_compiles_nothing(rank_pool, way, cached):
    expected = small_pipe(way)(**flux_call()).images
    shapes = [(1, 2), (1, 2), (2, 1), (1, 2), (2, 1)]
    for outs, frames in rank_pool.run(draw_in_rounds, 2, way, shapes, cached=cached):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
        assert frames[0] == frames[1] < frames[2] == frames[3] == frames[4], frames


@pytest.mark.long
@pytest.mark.parametrize("way", ["torch.compile", "blocks"])
def test_no_recompile_over_two_generations_on_four_ranks(rank_pool, way):
    expected = small_pipe(way)(**flux_call()).images
    graphs = WAYS[way][1]
    for outs, frames in rank_pool.run(draw_compiled, 4, way, "after", 2, 2):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
        assert frames == [graphs, graphs]


@pytest.mark.long  # The default run compiles with Inductor on one mesh in tests/test_compile.py.
def test_inductor_runs_two_generations_from_one_graph(rank_pool):
    expected = small_pipe("torch.compile")(**flux_call()).images
    for outs, frames in rank_pool.run(draw_compiled, 2, "torch.compile", "after", 2, 1, backend="inductor"):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
        assert frames == [1, 1]


SIZES = [
    (64, 64),
    (72, 56),
    (8, 8),
    (16, 8),
    (24, 40),
    (80, 64),
    (48, 48),
    (56, 88),
    (32, 32),
    (40, 40),
    (64, 88),
    (72, 72),
]


def draw_sizes(way):
    counter = CompileCounterWithBackend("aot_eager")
    pipe = parallelize_pipe(small_pipe(way), mesh=cpu_mesh(1, 2))
    WAYS[way][0](pipe, counter)
    outs = [pipe(**flux_call(height=height, width=width, num_inference_steps=1)).images for height, width in SIZES]
    return outs, counter.frame_count


@pytest.mark.long  # tests/test_compile.py has twelve lengths of a model of a few layers.
def test_twelve_sizes_work_compiled_with_few_compilations(rank_pool):
    pipe = small_pipe("torch.compile")
    expected = [pipe(**flux_call(height=height, width=width, num_inference_steps=1)).images for height, width in SIZES]
    for outs, compiled in rank_pool.run(draw_sizes, 2, "torch.compile"):
        errors = [relative_error(out, alone) for out, alone in zip(outs, expected, strict=True)]
        assert max(errors) < 1e-5, errors
        # There is one graph for the first size, one for all others, and one for ranks with a single token or none,
        # because Dynamo specializes lengths 0 and 1.
        assert compiled <= 4, compiled
