"""Compiled blocks compute the same bits under PipeFusion as uncompiled ones, and no graph is compiled twice."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from para_core import PipeFusion
from para_core.adapters import parallelize_pipe, pipefusion_report, unparallelize_pipe
from para_core.adapters.inspect.components import blocks_of
from tests.tiny import flux_pipe
from tests.weights.pipes import generate, make

pytestmark = pytest.mark.slow

STEPS = 9
# The tiny videos have three frames.
PATCHES = {"qwen-image": 4}


# Qwen-Image's patches on a ring have more than 8 shapes (docs/stages.md).
@torch._dynamo.config.patch(recompile_limit=32)
def eager_and_compiled(name, order=("apply", "compile"), shape=None):
    """Return the output of eager blocks, two outputs of compiled ones, the number of graphs after each, and the outputs
    of the undone and of a plain pipe.
    """
    torch._dynamo.reset()
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "ring", "ulysses"))
    options = {"mesh": mesh, "pipefusion": PipeFusion(PATCHES.get(name, 2))}
    expected = generate(parallelize_pipe(make(name), **options), name, num_inference_steps=STEPS)
    pipe, counter = make(name), CompileCounterWithBackend("aot_eager")
    for step in order:
        if step == "apply":
            parallelize_pipe(pipe, **options)
        else:
            # compile_repeated_blocks does this, but CogVideoX and Mochi do not have it.
            for block in blocks_of(pipe.transformer):
                block.compile(backend=counter, fullgraph=True)
    outputs, graphs = [], []
    for _ in range(2):
        outputs.append(generate(pipe, name, num_inference_steps=STEPS))
        graphs.append(counter.frame_count)
    assert pipefusion_report(pipe).patched_calls > 0
    if shape is not None and shape[0] > 1:
        return expected, outputs, graphs, [expected, expected]  # Nothing undoes stages.
    undone = [generate(each, name) for each in (unparallelize_pipe(pipe), make(name))]
    return expected, outputs, graphs, undone


def check(expected, outputs, graphs, undone):
    assert all(torch.equal(each, expected) for each in outputs)
    assert graphs[0] == graphs[1] > 0
    assert torch.equal(*undone)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        # The default run compiles blocks in test_shared_patches_need_one_graph_per_form.
        pytest.param("flux", ("compile", "apply"), marks=pytest.mark.long),
        pytest.param("flux", ("apply", "compile"), marks=pytest.mark.long),
        *[
            pytest.param(name, ("apply", "compile"), marks=pytest.mark.long)
            for name in ("wan", "qwen-image", "hunyuan", "cogvideox", "mochi")
        ],
    ],
)
def test_compiled_blocks_give_the_bits_of_eager_patches(name, order):
    check(*eager_and_compiled(name, order))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape"),
    [("flux", (2, 1, 1)), ("wan", (2, 1, 1)), ("flux", (1, 1, 2)), ("qwen-image", (1, 2, 1)), ("wan", (2, 1, 2))],
)
def test_compiled_blocks_of_stages_equal_eager(rank_pool, name, shape):
    for of_rank in rank_pool.run(eager_and_compiled, torch.Size(shape).numel(), name, shape=shape):
        check(*of_rank)


def compiled_with_few_graphs(name, num_patches, limit):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    pipe = parallelize_pipe(make(name), mesh=mesh, pipefusion=PipeFusion(num_patches))
    expected = generate(pipe, name, num_inference_steps=STEPS)
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=limit):
        return expected, generate(pipe, name, num_inference_steps=STEPS)


# FLUX has three shapes: all tokens, a patch with text, and a patch without text.
@pytest.mark.long
def test_shared_patches_need_one_graph_per_form(rank_pool):
    for expected, output in rank_pool.run(compiled_with_few_graphs, 2, "flux", 3, limit=3):
        assert torch.equal(expected, output)


@pytest.mark.parametrize("way", ["in place", "in its place", "forward"])
@pytest.mark.parametrize("name", ["flux", "mochi"])
def test_whole_graph_is_refused_before_the_call(name, way):
    pipe = parallelize_pipe(make(name), pipefusion=PipeFusion())
    if way == "in place":
        pipe.transformer.compile(backend="eager", fullgraph=True)
    elif way == "forward":
        pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend="eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"pipe\.transformer .*compile_repeated_blocks\(fullgraph=True\)"):
        generate(pipe, name, num_inference_steps=STEPS)


def test_gradients_are_refused():
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())
    with pytest.raises(RuntimeError, match=r"gradients .*torch\.no_grad\(\)"):
        pipe.transformer(None)
