"""Weights sharded by FSDP2 give the same bits as replicated weights."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    shard_weights,
)
from para_core.adapters.inspect.components import blocks_of, components_of
from para_core.weights.fsdp import shard_blocks
from tests.tiny import cpu_mesh, flux_inputs, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import bytes_of, generate, make


def mesh_of(shape):
    return cpu_mesh(*shape[1:], batch=shape[0])


def share(name, shape):
    """Generate with replicated weights, and twice with sharded ones. Return the outputs and the bytes of the blocks."""
    pipe = parallelize_pipe(make(name), mesh=mesh_of(shape))
    whole = generate(pipe, name)
    blocks = [block for module in components_of(pipe).values() for block in blocks_of(module)]
    before = bytes_of(*blocks)
    shard_weights(pipe)
    after = bytes_of(*blocks)
    assert all(isinstance(block, FSDPModule) for block in blocks)
    shared = [generate(pipe, name) for _ in range(2)]
    return whole, shared, before, after


# FLUX has CLIP and T5. HunyuanVideo has Llama, whose hidden states are recorded, and no branches of guidance. Wan 2.2
# distributes guidance over ranks, and each half of them has a copy. CogVideoX has a batch of both branches, Qwen-Image
# has Qwen2.5-VL, FLUX.2 has Qwen3.
FAMILIES = ("wan", "hunyuan", "qwen-image", "cogvideox", "mochi", "ltx", "flux2 klein")
SHAPES = ((1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2))
EVERY_FAMILY = [(name, shape) for name in FAMILIES for shape in SHAPES if (name, shape[0]) != ("hunyuan", 2)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flux", (1, 1, 2)),
        ("hunyuan", (1, 2, 1)),
        ("wan 2.2", (2, 1, 2)),
        *[pytest.param(*case, marks=pytest.mark.long) for case in EVERY_FAMILY],
    ],
)
def test_shared_weights_give_the_same_bits(rank_pool, name, shape):
    for whole, shared, before, after in rank_pool.run(share, torch.Size(shape).numel(), name, shape):
        assert all(torch.equal(whole, out) for out in shared)
        # A dim that the ranks do not divide is not padded, so one rank may hold a row more of each parameter.
        assert after < 1.1 * before / (shape[1] * shape[2])


def share_dit():
    """Generate with DiT on one device and with sharded weights. Then try to split it into stages."""
    alone = generate(make("dit"), "dit")
    pipe = parallelize_pipe(make("dit"), mesh=cpu_mesh(2, 1), weights="fsdp")
    assert isinstance(pipe.transformer.transformer_blocks[0], FSDPModule)
    with pytest.raises(TypeError, match=r"norm1\.emb"):
        parallelize_pipe(pipe, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pipe",)))
    return alone, generate(pipe, "dit")


def test_model_that_calls_a_part_of_a_block_itself(rank_pool):
    for alone, shared in rank_pool.run(share_dit, 2):
        assert relative_error(shared, alone) < 1e-5


def with_weights_argument():
    pipe = make("flux")
    mesh = init_context_parallel_mesh("cpu")
    whole = generate(parallelize_pipe(pipe, mesh=mesh), "flux")
    held = bytes_of(pipe.transformer)
    shared = generate(parallelize_pipe(pipe, mesh=mesh, weights="fsdp"), "flux")
    assert bytes_of(pipe.transformer) < held
    pipe = make("flux")
    parallelize_pipe(shard_weights(pipe, mesh, components=["transformer"]), mesh=mesh)
    assert isinstance(pipe.transformer, FSDPModule)
    assert not isinstance(pipe.text_encoder, FSDPModule)
    of_transformer = generate(pipe, "flux")
    # The components that are not sharded yet are added.
    parallelize_pipe(pipe, mesh=mesh, weights="fsdp")
    assert isinstance(pipe.text_encoder, FSDPModule)
    outs, cached = [whole, shared, of_transformer, generate(pipe, "flux")], []
    for each in (parallelize_pipe(make("flux"), mesh=mesh), pipe):
        apply_cache_on_pipe(each, residual_diff_threshold=2.0, max_consecutive_hits=1)
        cached.append((generate(each, "flux", num_inference_steps=5), [row.hit for row in cache_report(each).rows]))
    return outs, cached


def test_parallelize_pipe_shards_what_is_not_sharded_yet(rank_pool):
    for outs, ((whole, hits), (shared, shared_hits)) in rank_pool.run(with_weights_argument, 2):
        assert all(torch.equal(outs[0], out) for out in outs)
        # A cache decides and skips as with whole weights.
        assert torch.equal(whole, shared)
        assert hits == shared_hits and any(hits)


def converted_late():
    pipe = parallelize_pipe(make("flux"), mesh=cpu_mesh(1, 2), weights="fsdp")
    # The pipe is on the CPU in float32 already.
    pipe.to("cpu", torch.float32)
    output = generate(pipe, "flux")
    with pytest.raises(RuntimeError, match=r"FSDP2.* cpu\b.* meta\b"):
        pipe.transformer.to("meta")
    message = r"torch\.float32.* torch\.bfloat16\b.*shard_weights"
    with pytest.raises(RuntimeError, match=message):
        pipe.to(torch.bfloat16)
    # Model offload moves the other components only.
    pipe.transformer._hf_hook = None
    assert pipe.transformer.to("meta") is pipe.transformer
    del pipe.transformer._hf_hook
    assert {x.device.type for x in pipe.transformer.parameters()} == {"cpu"}
    return output, generate(make("flux"), "flux"), {x.dtype for x in pipe.transformer.parameters()}


@pytest.mark.long
def test_sharded_weights_keep_their_dtype_and_device(rank_pool):
    for output, alone, dtypes in rank_pool.run(converted_late, 2):
        assert relative_error(output, alone) < 1e-5
        assert dtypes == {torch.float32}


def offloaded():
    pipe = parallelize_pipe(make("flux"), mesh=init_context_parallel_mesh("cpu"))
    whole = generate(pipe, "flux")
    shard_weights(pipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
    shared = generate(pipe, "flux")
    # The same policy once more changes nothing.
    shard_weights(pipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(RuntimeError, match=r"offload_policy.*from_pretrained"):
        shard_weights(pipe)
    return whole, shared, generate(pipe, "flux")


def test_parts_may_lie_in_host_memory(rank_pool):
    for outs in rank_pool.run(offloaded, 2):
        assert all(torch.equal(outs[0], out) for out in outs)


def over_all_ranks(kind):
    """Run two replicas with different prompts on weights that all ranks share."""
    everywhere = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    if kind == "hsdp":
        everywhere = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    pipe = parallelize_pipe(make("flux"), mesh=replicas["ring", "ulysses"])
    seed = replicas.get_local_rank("replica")
    whole = generate(pipe, "flux", generator=torch.Generator().manual_seed(seed))
    shard_weights(pipe, everywhere)
    shared = generate(pipe, "flux", generator=torch.Generator().manual_seed(seed))
    if kind == "fsdp":
        apply_cache_on_pipe(pipe)
        with pytest.raises(RuntimeError, match=r"weights .*4 ranks, .*2\. .*cache"):
            generate(pipe, "flux")
    return whole, shared


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_replicas_may_share_weights(rank_pool, kind):
    for whole, shared in rank_pool.run(over_all_ranks, 4, kind):
        assert torch.equal(whole, shared)


def meshes_that_do_not_fit():
    pipe, of_branches = make("flux"), cpu_mesh(1, 1, batch=2)
    with pytest.raises(ValueError, match=r"mesh .*2 × 1 "):
        shard_weights(pipe, of_branches)
    three = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"mesh .*3 dims .*\(2, 1, 1\)"):
        shard_weights(pipe, three)
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("alone",))
    if of_branches.get_rank() == 1:
        with pytest.raises(ValueError, match=r"rank 1 .*mesh of 1 "):
            shard_weights(pipe, other)


def test_meshes_that_fsdp_does_not_take_are_refused(rank_pool):
    rank_pool.run(meshes_that_do_not_fit, 2)


@pytest.mark.parametrize("attempt", [parallelize_pipe, shard_weights])
@pytest.mark.parametrize("where", ["pipe", "transformer"])
def test_balanced_pipeline_is_refused_with_way_out(attempt, where):
    pipe = flux_pipe()
    spread = pipe if where == "pipe" else pipe.transformer
    spread.hf_device_map = {"text_encoder": 0, "transformer": 1}
    with pytest.raises(ValueError, match=r"\['0', '1'\].*parallelize_pipe\(pipe, mesh=mesh, weights='fsdp'\)"):
        attempt(pipe)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "zero"}, ValueError, "method .*'zero'; .*'fsdp'"),
        (
            {"components": ["vae"]},
            ValueError,
            "components .*'vae'; .*FluxPipeline .*: text_encoder, .*transformer",
        ),
        ({"components": "transformer"}, TypeError, r"components=\['transformer'\]"),
        ({"components": []}, ValueError, r"components .*\[\].*FluxPipeline .*text_encoder, .*transformer"),
        ({"components": [], "method": "tensor"}, ValueError, r"components .*\[\].*FluxPipeline .*text_encoder"),
        ({"offload_policy": "cpu"}, TypeError, r"offload_policy .*'cpu'.*CPUOffloadPolicy\(\)"),
    ],
)
def test_what_cannot_be_sharded_is_refused(options, error, message):
    pipe = flux_pipe()
    before = type(pipe)
    with fake_group(2), pytest.raises(error, match=message):
        shard_weights(pipe, **options)
    assert type(pipe) is before


def is_gathered(block):
    """Return whether the weights of ``block`` are whole or being gathered."""
    state = block._get_fsdp_state()
    # torch 2.11 has one group per state, and other versions have a list.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group.is_unsharded or group._all_gather_result is not None for group in groups)


def watch_blocks(shape):
    """Return the blocks that are gathered while each block computes, and the bytes of replicated and sharded blocks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    transformer = flux_transformer(num_layers=2, num_single_layers=3)
    whole = transformer(**flux_inputs(20, 7), return_dict=False)[0]
    blocks = blocks_of(transformer)
    before = bytes_of(*blocks)
    shard_blocks(transformer, blocks, mesh)
    gathered = []

    def watch(*_):
        gathered.append([index for index, block in enumerate(blocks) if is_gathered(block)])

    for block in blocks:
        block.register_forward_pre_hook(watch)
    shared = transformer(**flux_inputs(20, 7), return_dict=False)[0]
    return torch.equal(whole, shared), gathered, before, bytes_of(*blocks)


# The second mesh is HSDP: two ranks shard the weights, and the two others have copies.
@pytest.mark.parametrize(("ranks", "shape"), [(2, (2,)), pytest.param(4, (2, 2), marks=pytest.mark.long)])
def test_only_next_block_is_gathered_during_compute(rank_pool, ranks, shape):
    for same, gathered, before, after in rank_pool.run(watch_blocks, ranks, shape):
        assert same
        assert gathered == [[0, 1], [1, 2], [2, 3], [3, 4], [4]]
        assert after < 1.1 * before / 2
