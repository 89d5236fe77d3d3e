"""Weights sharded by FSDP2 give the same bits as replicated weights."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
    unparallelize_transformer,
)
from para_core.adapters.inspect.components import blocks_of, components_with_blocks
from para_core.adapters.models.flux import FLUX
from para_core.instance.private_class import unwrapped_class
from para_core.weights.fsdp import shard_blocks
from tests.adapters.parallel.unchanged import same_pipe
from tests.tiny import cpu_mesh, flux_inputs, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import bytes_of, generate, make
from zoo.tiny.transformers.registry import MODELS


def share(name, shape):
    """Generate with replicated weights, and twice with sharded ones."""
    pipe = parallelize_pipe(make(name), mesh=cpu_mesh(*shape[1:], batch=shape[0]))
    whole = generate(pipe, name)
    blocks = [block for module in components_with_blocks(pipe).values() for block in blocks_of(module)]
    held = bytes_of(*blocks)
    shard_weights(pipe)
    # A dim that the ranks do not divide is not padded, so one rank may hold a row more of each parameter.
    assert bytes_of(*blocks) < 1.1 * held / (shape[1] * shape[2])
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert all(torch.equal(generate(pipe, name), whole) for _ in range(2))


def share_in_parts():
    pipe, mesh = make("flux"), init_context_parallel_mesh("cpu")
    outs = [generate(parallelize_pipe(pipe, mesh=mesh), "flux")]
    held = bytes_of(pipe.transformer)
    adapter = replace(FLUX, called_outside=("transformer_blocks.0.norm1",))
    outs.append(generate(parallelize_pipe(pipe, mesh=mesh, weights="fsdp", adapter=adapter), "flux"))
    norms = pipe.transformer.transformer_blocks[0].norm1, pipe.transformer.transformer_blocks[0].norm1_context
    assert [isinstance(norm.linear.weight, DTensor) for norm in norms] == [False, True]
    assert bytes_of(pipe.transformer) < held
    pipe = make("flux")
    parallelize_pipe(shard_weights(pipe, mesh, components=["transformer"]), mesh=mesh)
    assert isinstance(pipe.transformer, FSDPModule)
    assert not isinstance(pipe.text_encoder, FSDPModule)
    outs.append(generate(pipe, "flux"))
    # The components that are not sharded yet are added.
    parallelize_pipe(pipe, mesh=mesh, weights="fsdp")
    assert isinstance(pipe.text_encoder, FSDPModule)
    outs.append(generate(pipe, "flux"))
    # A cache decides and skips as with whole weights.
    cached, hits = [], []
    for each in (parallelize_pipe(make("flux"), mesh=mesh), pipe):
        apply_cache_on_pipe(each, residual_diff_threshold=2.0, max_consecutive_hits=1)
        cached.append(generate(each, "flux", num_inference_steps=5))
        hits.append([row.hit for row in cache_report(each).rows])
    assert torch.equal(*cached) and hits[0] == hits[1] and any(hits[0])
    # Parts may lie in host memory. The same policy once more changes nothing.
    pipe = parallelize_pipe(make("flux"), mesh=mesh)
    for _ in range(2):
        shard_weights(pipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
        outs.append(generate(pipe, "flux"))
    with pytest.raises(RuntimeError, match=r"offload_policy.*from_pretrained"):
        shard_weights(pipe)
    # The pipe is on the CPU in float32 already.
    pipe.to("cpu", torch.float32)
    for refused, message in (
        (lambda: pipe.transformer.to("meta"), r"FSDP2.* cpu\b.* meta\b"),
        (lambda: pipe.to(torch.bfloat16), r"torch\.float32.* torch\.bfloat16\b.*shard_weights"),
        (pipe.transformer.half, r"torch\.float32.* torch\.float16\b.*shard_weights"),
        (lambda: pipe.enable_sequential_cpu_offload(device="cpu"), "sequential .*enable_model_cpu_offload"),
    ):
        with pytest.raises(RuntimeError, match=message):
            refused()
    # Model offload moves the other components only.
    pipe.transformer._hf_hook = None
    assert pipe.transformer.to("meta") is pipe.transformer
    del pipe.transformer._hf_hook
    assert {(x.device.type, x.dtype) for x in pipe.transformer.parameters()} == {("cpu", torch.float32)}
    outs.append(generate(pipe, "flux"))
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="FluxTransformer2DModel cannot be copied or pickled"):
            way(pipe.transformer)
    # Blocks may be compiled, and the whole may not.
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    assert all(block._compiled_call_impl is not None for block in blocks_of(pipe.transformer))
    pipe.transformer.compile(backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"weights='fsdp'.*compile_repeated_blocks"):
        generate(pipe, "flux")
    assert all(torch.equal(outs[0], out) for out in outs)


def is_gathered(block):
    """Return whether the weights of ``block`` are whole or being gathered."""
    state = block._get_fsdp_state()
    # torch 2.11 has one group per state, and other versions have a list.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group.is_unsharded or group._all_gather_result is not None for group in groups)


def gather_one_block_in_advance(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    transformer = flux_transformer(num_layers=2, num_single_layers=3)
    whole = transformer(**flux_inputs(20, 7), return_dict=False)[0]
    blocks, gathered = blocks_of(transformer), []
    held = bytes_of(*blocks)
    shard_blocks(transformer, blocks, mesh)
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: gathered.append([*map(is_gathered, blocks)]))
    assert torch.equal(transformer(**flux_inputs(20, 7), return_dict=False)[0], whole)
    assert gathered == [[index in (now, now + 1) for index in range(5)] for now in range(5)]
    assert bytes_of(*blocks) < 1.1 * held / 2


def refuse_meshes():
    pipe, of_branches = make("flux"), cpu_mesh(1, 1, batch=2)
    of_heads = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ulysses", "tensor"))
    three = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    for mesh, message in ((of_branches, "2 × 1 "), (of_heads, "2 ranks along 'tensor'"), (three, r"3 dims .*2, 1, 1")):
        with pytest.raises(ValueError, match=f"mesh .*{message}"):
            shard_weights(pipe, mesh)
    flat = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"disagree about .*method.*fsdp.*tensor"):
        shard_weights(pipe, flat, method=("fsdp", "tensor")[flat.get_rank()])
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("alone",))
    if of_branches.get_rank() == 1:
        with pytest.raises(ValueError, match=r"rank 1 .*mesh of 1 "):
            shard_weights(pipe, other)
    # DiT calls a part of a block itself, which no stage could.
    alone = generate(make("dit"), "dit")
    pipe = parallelize_pipe(make("dit"), mesh=cpu_mesh(2, 1), weights="fsdp")
    with pytest.raises(TypeError, match=r"norm1\.emb"):
        parallelize_pipe(pipe, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pipe",)))
    assert relative_error(generate(pipe, "dit"), alone) < 1e-5


@pytest.mark.parametrize(
    ("check", "ranks", "arguments"),
    [
        (share_in_parts, 2, ()),
        (refuse_meshes, 2, ()),
        (gather_one_block_in_advance, 2, ((2,),)),
        # This is HSDP: two ranks shard the weights, and the two others have copies.
        pytest.param(gather_one_block_in_advance, 4, ((2, 2),), marks=pytest.mark.long),
        # The two branches of guidance have a copy each. The shape is batch × ring × ulysses.
        (share, 4, ("wan 2.2", (2, 1, 2))),
    ],
)
def test_sharded_weights_are_exact_or_refused(rank_pool, check, ranks, arguments):
    rank_pool.run(check, ranks, *arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "zero"}, ValueError, "method .*'zero'; .*'fsdp'"),
        ({"components": ["vae"]}, ValueError, "components .*'vae'; .*FluxPipeline .*: text_encoder, .*transformer"),
        ({"components": "transformer"}, TypeError, r"components=\['transformer'\]"),
        ({"components": []}, ValueError, r"components .*\[\].*FluxPipeline .*text_encoder"),
        ({"offload_policy": "cpu"}, TypeError, r"offload_policy .*'cpu'.*CPUOffloadPolicy\(\)"),
    ],
)
def test_what_cannot_be_sharded_is_refused(options, error, message):
    pipe = flux_pipe()
    with same_pipe(pipe), fake_group(2), pytest.raises(error, match=message):
        shard_weights(pipe, **options)


def call_in_order(order):
    """Return the output after ``order``, the number of tokens that the blocks saw, and their classes."""
    transformer, tokens = MODELS["wan"].build(), set()
    for step in order:
        if step == "parallelize":
            parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        elif step == "unparallelize":
            unparallelize_transformer(transformer)
        else:
            for part in transformer.blocks if step == "blocks" else [transformer]:
                fully_shard(part)
    for block in transformer.blocks:
        block.attn1.to_q.register_forward_pre_hook(lambda module, args: tokens.add(args[0].shape[1]))
    with torch.no_grad():
        # Two ranks share 45 tokens.
        out = transformer(**MODELS["wan"].inputs(3, 6, 10), return_dict=False)[0].clone()
    classes = {(isinstance(block, FSDPModule), unwrapped_class(block).__name__) for block in transformer.blocks}
    return out, tokens, classes


BEFORE, AFTER = ("blocks", "root", "parallelize"), ("parallelize", "blocks", "root")
# FSDP2 keeps the classes that it makes, so an earlier model could change a later one.
ORDERS = [BEFORE, AFTER, ("parallelize", "root"), ("blocks", "parallelize", "root"), (*AFTER, "unparallelize")]
ORDERS += [BEFORE, ("blocks", "root"), AFTER]


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hook of this test only counts tokens.
def test_own_fully_shard_is_parallel_and_exact_in_any_order(rank_pool):
    expected, all_tokens, _ = call_in_order(())
    for order in ORDERS:
        for rank, (out, tokens, classes) in enumerate(rank_pool.run(call_in_order, 2, order)):
            is_parallel = "parallelize" in order and "unparallelize" not in order
            assert tokens == ({(23, 22)[rank]} if is_parallel else all_tokens), order
            assert relative_error(out, expected) < 1e-5, order
            assert classes == {("blocks" in order, "WanTransformerBlock")}, order
