"""A transformer that was compiled before or after, whole or by blocks, runs in parallel in full graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error

# The default run compiles small models in tests/test_compile.py and tests/plans/test_plan.py.
pytestmark = pytest.mark.long

# The number of graphs. By blocks there is one graph for single blocks and there are two for double ones, whose strides
# differ between the first and the second. The unmodified pipe has as many.
GRAPHS = {"torch.compile": 1, "in place": 1, "blocks": 3}


def small_pipe(way):
    """Return a pipeline with one block of each kind if its blocks are compiled together, which halves compile time."""
    if way == "blocks":
        return flux_pipe()
    return flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))


def compile_transformer(pipe, way, backend):
    if way == "torch.compile":
        pipe.transformer = torch.compile(pipe.transformer, backend=backend, fullgraph=True)
    elif way == "in place":
        pipe.transformer.compile(backend=backend, fullgraph=True)
    else:
        pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)


def draw_on(way, when, shapes, *, backend="aot_eager", cached=False, undone=False):
    """Generate twice on each mesh, then with a cache, then on one device.

    Returns:
        The images, and the number of graphs after each mesh.
    """
    counter, pipe, images, graphs = CompileCounterWithBackend(backend), small_pipe(way), [], []

    def draw():
        images.append(pipe(**flux_call()).images)

    if when == "before":
        compile_transformer(pipe, way, counter)
    for index, shape in enumerate(shapes):
        parallelize_pipe(pipe, mesh=cpu_mesh(*shape))
        if when == "after" and index == 0:
            compile_transformer(pipe, way, counter)
        draw()
        graphs_of_first = counter.frame_count
        draw()
        assert index > 0 or counter.frame_count == graphs_of_first
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
            draw()
            remove_cache_from_pipe(pipe)
            draw()
        if undone:
            unparallelize_pipe(pipe)
            draw()
        graphs.append(counter.frame_count)
    unparallelize_pipe(pipe)
    draw()
    return images, graphs


def check(rank_pool, num_ranks, way, when, shapes, **options):
    """Compare the images with those of the unmodified pipeline, and return the numbers of graphs."""
    expected = small_pipe(way)(**flux_call()).images
    results = rank_pool.run(draw_on, num_ranks, way, when, shapes, **options)
    for images, _ in results:
        errors = [relative_error(image, expected) for image in images]
        assert max(errors) < 1e-5, errors
    (graphs,) = {tuple(graphs) for _, graphs in results}
    return graphs


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", GRAPHS)
def test_two_generations_then_other_mesh_compile_once(rank_pool, way, when):
    assert check(rank_pool, 2, way, when, [(1, 2), (2, 1)])[0] == GRAPHS[way]


@pytest.mark.parametrize(
    ("num_ranks", "way", "shape", "backend"),
    [
        (4, "torch.compile", (2, 2), "aot_eager"),
        (4, "blocks", (2, 2), "aot_eager"),
        (2, "torch.compile", (2, 1), "inductor"),
    ],
)
def test_no_recompile_over_two_generations(rank_pool, num_ranks, way, shape, backend):
    assert check(rank_pool, num_ranks, way, "after", [shape], backend=backend) == (GRAPHS[way],)


@pytest.mark.parametrize(("way", "cached"), [("in place", False), ("in place", True), ("torch.compile", True)])
def test_second_set_up_with_equal_settings_compiles_nothing(rank_pool, way, cached):
    shapes = [(1, 2), (1, 2), (2, 1), (1, 2), (2, 1)]
    graphs = check(rank_pool, 2, way, "before", shapes, backend="eager", cached=cached, undone=True)
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3] == graphs[4], graphs


SIZES = [(64, 64), (72, 56), (8, 8), (16, 8), (24, 40), (80, 64), (48, 48), (56, 88), (32, 32), (40, 40), (64, 88)]


def draw_sizes(pipe):
    return [pipe(**flux_call(height=height, width=width, num_inference_steps=1)).images for height, width in SIZES]


def draw_sizes_compiled():
    counter = CompileCounterWithBackend("aot_eager")
    pipe = parallelize_pipe(small_pipe("torch.compile"), mesh=cpu_mesh(1, 2))
    compile_transformer(pipe, "torch.compile", counter)
    return draw_sizes(pipe), counter.frame_count


def test_eleven_sizes_work_compiled_with_few_compilations(rank_pool):
    expected = draw_sizes(small_pipe("torch.compile"))
    for images, compiled in rank_pool.run(draw_sizes_compiled, 2):
        errors = [relative_error(image, alone) for image, alone in zip(images, expected, strict=True)]
        assert max(errors) < 1e-5, errors
        # There is one graph for the first size, one for all others, and one for ranks with a single token or none,
        # because Dynamo specializes lengths 0 and 1.
        assert compiled <= 4, compiled
