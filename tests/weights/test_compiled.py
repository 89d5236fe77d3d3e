"""Sharded weights under torch.compile and with torchao's quantization are exact, or refused with an error."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import init_context_parallel_mesh
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, shard_weights
from tests.tiny import relative_error
from tests.weights.pipes import generate, make


def compile_blocks(order, *, cached):
    """Return outputs with replicated weights in eager code and with sharded ones in a graph for each block, and the
    number of graphs after one call and after two.
    """
    outs = []
    for compiled in (False, True):
        pipe = parallelize_pipe(make("flux"), mesh=init_context_parallel_mesh("cpu"))
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=2.0, max_consecutive_hits=1)
        counter = CompileCounterWithBackend("aot_eager")
        for step in order if compiled else ():
            if step == "shard":
                shard_weights(pipe, components=["transformer"])
            else:
                pipe.transformer.compile_repeated_blocks(backend=counter, fullgraph=True)
        outs.append(generate(pipe, "flux", num_inference_steps=4))
    graphs = counter.frame_count
    generate(pipe, "flux", num_inference_steps=4)
    return outs, graphs, counter.frame_count


@pytest.mark.long
@pytest.mark.parametrize(("order", "cached"), [(("shard", "compile"), True), (("compile", "shard"), False)])
def test_each_block_is_a_whole_graph_over_shared_weights(rank_pool, order, cached):
    for outs, graphs, later in rank_pool.run(compile_blocks, 2, order, cached=cached):
        assert torch.equal(*outs)
        assert 0 < graphs == later


def compile_whole(method):
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2 if method == "tensor" else None)
    pipe = make("flux")
    alone = generate(pipe, "flux")
    parallelize_pipe(pipe, mesh=mesh)
    shard_weights(pipe, mesh, method=method, components=["transformer"])
    counter = CompileCounterWithBackend("aot_eager")
    pipe.transformer = torch.compile(pipe.transformer, backend=counter, fullgraph=True)
    if method == "fsdp":
        with pytest.raises(RuntimeError, match=r"weights='fsdp'.*compile_repeated_blocks"):
            generate(pipe, "flux")
        return alone, alone, 1
    return alone, generate(pipe, "flux"), counter.frame_count


@pytest.mark.long
@pytest.mark.parametrize("method", ["tensor", "fsdp"])
def test_whole_graph_works_over_tensor_ranks_not_fsdp(rank_pool, method):
    for alone, out, graphs in rank_pool.run(compile_whole, 2, method):
        assert relative_error(out, alone) < 1e-5
        assert graphs == 1


def compile_video(sizes):
    pipe = make("cogvideox")
    parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", max_tensor_dim_size=3), weights="tensor")
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    return [generate(pipe, "cogvideox", **size) for size in sizes]


@pytest.mark.long
def test_whole_graph_over_tensor_ranks_accepts_varying_sizes(rank_pool):
    sizes = [{}, {"num_frames": 13, "height": 64, "width": 48}]
    pipe = make("cogvideox")
    expected = [generate(pipe, "cogvideox", **size) for size in sizes]
    for outs in rank_pool.run(compile_video, 3, sizes):
        assert [out.shape for out in outs] == [out.shape for out in expected]
        assert max(relative_error(*pair) for pair in zip(outs, expected, strict=True)) < 1e-5


def quantized_tensors(compiled):
    alone, pipe = make("flux"), make("flux")
    quantize_(alone.transformer, Int8WeightOnlyConfig())
    parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", max_tensor_dim_size=2), weights="tensor")
    quantize_(pipe.transformer, Int8WeightOnlyConfig())
    if compiled == "whole":
        pipe.transformer.compile(fullgraph=True, backend="aot_eager")
    elif compiled:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    held = pipe.transformer.transformer_blocks[0].attn.to_q.weight.qdata
    out = generate(pipe, "flux")
    shape = held.to_local().shape
    return generate(alone, "flux"), out, shape, held.dtype


@pytest.mark.long
@pytest.mark.parametrize("compiled", [None, "blocks", "whole"])
def test_quantization_after_tensor_sharding_equals_one_device(rank_pool, compiled):
    for alone, out, shape, dtype in rank_pool.run(quantized_tensors, 2, compiled):
        assert relative_error(out, alone) < 1e-5
        assert (shape, dtype) == ((32, 64), torch.int8)


def quantized():
    pipe = parallelize_pipe(make("flux"), mesh=init_context_parallel_mesh("cpu"))
    blocks = pipe.transformer.transformer_blocks
    quantize_(blocks, int8_weight_only_quantized_training())
    whole = generate(pipe, "flux")
    shard_weights(pipe, components=["transformer"])
    shared = generate(pipe, "flux")
    pipe = make("flux")
    quantize_(pipe.transformer, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"Int8Tensor.* fsdp_pre_all_gather"):
        shard_weights(pipe, init_context_parallel_mesh("cpu"), components=["transformer"])
    return whole, shared


@pytest.mark.long
def test_torchao_weights_are_sharded_if_splittable(rank_pool):
    for whole, shared in rank_pool.run(quantized, 2):
        assert torch.equal(whole, shared)
