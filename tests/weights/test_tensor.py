"""Heads and hidden units sharded over tensor ranks give the result of one device, also with sharded tokens."""

import warnings
from functools import cache
from unittest import mock

import pytest
import torch
from diffusers import FluxPipeline, TensorParallelConfig
from diffusers.hooks import tensor_parallel
from peft import LoHaConfig, LoraConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._pytree import tree_leaves

from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    from_pretrained_sharded,
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
)
from para_core.adapters.registry import mesh_of, tensor_plan_for
from para_core.weights.tensor import shard_tensors
from tests.adapters.parallel.test_undo import same_pipe
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import bytes_of, generate, make
from zoo.tiny.transformers.registry import MODELS

# Four ranks can share these heads.
HEADS = {"num_attention_heads": 4}
CONFIGS = {
    "flux": {},
    "flux2": {},
    "qwen-image": {},
    "qwen-image, masked": {},
    "wan": {},
    # Image tokens have their own key projection.
    "wan, image context": {},
    "hunyuan": {},
    "hunyuan, image by token replacement": {},
    "ltx": {"cross_attention_dim": 128},
    # The numbers of hidden units, 8 / 3 of the width, are divisible too.
    "z-image": {"n_heads": 4, "n_kv_heads": 4, "axes_dims": (8, 8, 8)},
    "cogvideox, rotary": {},
    "mochi": {"num_attention_heads": 12, "attention_head_dim": 8},
    # Another model in this list has the same blocks.
    "wan vace": {},
    # The width must be that of the face tokens.
    "wan animate": {"num_attention_heads": 2, "attention_head_dim": 48},
    "skyreels v2": {},
    "skyreels v2, causal": {},
    "chronoedit": {},
    "anyflow": {},
    "framepack": {},
    "hunyuan 1.5, image": {},
    "consisid": {"num_attention_heads": 6, "LFE_output_dim": 128},
    "qwen-image 2.1": {},
    "chroma": {},
    "longcat-image": {},
    # The width must be that of the ControlNet's residuals.
    "bria": {"num_attention_heads": 6, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "bria fibo": {},
    # The hidden units share a projection with a gate, and the blocks store their number.
    "ovis": {},
}
SIZES = [(3, 6, 10), (1, 6, 6)]


def build(name):
    model = MODELS[name]
    heads = {} if name == "z-image" else HEADS
    config = {**heads, **CONFIGS[name]}
    if name == "wan, image context":
        config["added_kv_proj_dim"] = 128
    return model.build(**config)


def call(transformer, name, size):
    with torch.no_grad(), warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        out = transformer(**MODELS[name].inputs(*size), return_dict=False)
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


@cache
def computed_alone(name):
    return [call(build(name), name, size) for size in SIZES]


def over(name, shape):
    transformer = build(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses", "tensor"))
    held = bytes_of(transformer)
    shard_tensors(transformer, tensor_plan_for(transformer), mesh["tensor"])
    parallelize_transformer(transformer, mesh=mesh)
    outs = [call(transformer, name, size) for size in SIZES]
    return outs, bytes_of(transformer) / held


def check(rank_pool, name, shape):
    for rank, (outs, share) in enumerate(rank_pool.run(over, torch.Size(shape).numel(), name, shape)):
        for size, out, alone in zip(SIZES, outs, computed_alone(name), strict=True):
            errors = [relative_error(tensor, reference) for tensor, reference in zip(out, alone, strict=True)]
            assert max(errors) < 1e-5, f"rank {rank}, {size}: {errors}"
        # Modulations and layers outside the blocks are replicated, and they are most of so small a model. HunyuanVideo
        # 1.5 embeds a second text with 2,048 channels, whatever its size.
        assert share < (0.99 if name == "hunyuan 1.5, image" else 0.9)


DEFAULT_ON_TWO = ("flux", "qwen-image, masked", "wan, image context", "hunyuan", "ltx", "z-image", "mochi", "ovis")


# Meshes are batch × ring × ulysses × tensor.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT_ON_TWO else pytest.mark.long) for name in CONFIGS]
)
def test_two_tensor_ranks_equal_one_device(rank_pool, name):
    check(rank_pool, name, (1, 1, 1, 2))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("wan, image context", (1, 1, 2, 2))]
    + [
        pytest.param(name, shape, marks=pytest.mark.long)
        for name in CONFIGS
        for shape in ((1, 1, 1, 4), (1, 1, 2, 2), (1, 2, 1, 2))
        if (name, shape) != ("wan, image context", (1, 1, 2, 2))
        # Some do not have four heads.
        and (shape[-1] == 2 or CONFIGS[name].get("num_attention_heads", 4) == 4)
    ],
)
def test_heads_and_tokens_are_shared_by_four_ranks(rank_pool, name, shape):
    check(rank_pool, name, shape)


def shard_by_diffusers(transformer, tensor):
    # diffusers shards on accelerators only, and the tests run on CPUs.
    with (
        mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)),
        mock.patch.object(torch.accelerator, "device_count", return_value=4),
    ):
        transformer.enable_parallelism(config=TensorParallelConfig(mesh=tensor))


def generate_over(how):
    """Generate on two tensor ranks, by para_core's plan or by diffusers' sharding. Then generate again with a cache."""
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    pipe = make("flux")
    alone = generate(pipe, "flux", num_inference_steps=4)
    held = bytes_of(pipe.transformer)
    if how == "ours":
        parallelize_pipe(pipe, mesh=mesh, weights="tensor")
    else:
        shard_by_diffusers(pipe.transformer, mesh["tensor"])
        for method, other in (("tensor", mesh), ("fsdp", init_context_parallel_mesh("cpu"))):
            with pytest.raises(ValueError, match=r"pipe\.transformer .*diffusers.* weights="):
                shard_weights(pipe, other, method=method)
        parallelize_pipe(pipe, mesh=mesh)
    out = generate(pipe, "flux", num_inference_steps=4)
    share = bytes_of(pipe.transformer) / held
    apply_cache_on_pipe(pipe, residual_diff_threshold=2.0, max_consecutive_hits=1)
    cached = generate(pipe, "flux", num_inference_steps=4)
    return alone, out, share, cached, [row.hit for row in cache_report(pipe).rows]


@pytest.fixture(scope="module")
def cached_alone():
    pipe = apply_cache_on_pipe(make("flux"), residual_diff_threshold=2.0, max_consecutive_hits=1)
    return generate(pipe, "flux", num_inference_steps=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["ours", "diffusers"])
def test_heads_are_sharded_by_either_plan(rank_pool, cached_alone, how):
    outs = rank_pool.run(generate_over, 2, how)
    for alone, out, share, cached, hits in outs:
        assert relative_error(out, alone) < 1e-5
        assert relative_error(cached, cached_alone) < 1e-5
        assert share < 0.9
        assert any(hits)
    assert torch.equal(outs[0][1], outs[1][1])


def generate_on_four(dim):
    """Generate with heads sharded over two ranks by diffusers, and tokens over two ranks."""
    mesh = init_context_parallel_mesh("cpu", **{f"max_{dim}_dim_size": 2}, max_tensor_dim_size=2)
    assert mesh[dim].size() == mesh["tensor"].size() == 2
    pipe = make("flux")
    alone = generate(pipe, "flux")
    shard_by_diffusers(pipe.transformer, mesh["tensor"])
    parallelize_pipe(pipe, mesh=mesh)
    return alone, generate(pipe, "flux")


@pytest.mark.parametrize("dim", ["ulysses", pytest.param("ring", marks=pytest.mark.long)])
def test_four_ranks_combine_diffusers_heads_and_our_tokens(rank_pool, dim):
    outs = rank_pool.run(generate_on_four, 4, dim)
    for alone, out in outs:
        assert relative_error(out, alone) < 1e-5
        assert torch.equal(out, outs[0][1])


def refusals_on_ranks():
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    pipe = make("flux")
    parallelize_pipe(pipe, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"heads .* no ranks, .*'tensor' .*\[0, 1\]"):
        generate(pipe, "flux")
    shard_weights(pipe, method="tensor")
    with pytest.raises(ValueError, match=r"LoRA with use_dora=True.*FluxTransformer2DModel.*before parallelize_pipe"):
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], use_dora=True))
    assert not hasattr(pipe.transformer, "peft_config")
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    with pytest.raises(RuntimeError, match=r"heads .*\[0, 1\] .*'tensor' .* none"):
        generate(pipe, "flux")
    pipe = make("flux")
    pipe.transformer.add_adapter(LoHaConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ValueError, match=r"to_q .*loha's Linear, .*pipe\.fuse_lora"):
        shard_weights(pipe, mesh, method="tensor")
    pipe = make("flux")
    pipe.transformer.fuse_qkv_projections()
    fused = r"transformer_blocks\.0\.attn\.to_qkv .* in no tensor plan.*unfuse_qkv_projections\(\)"
    with same_pipe(pipe), pytest.raises(ValueError, match=fused):
        shard_weights(pipe, mesh, method="tensor")
    pipe.transformer = flux_transformer(num_attention_heads=3)
    with pytest.raises(ValueError, match=r"3 heads, .*2 .*max_tensor_dim_size .*\[3\]"):
        shard_weights(pipe, mesh, method="tensor")


def test_unknown_tensor_ranks_and_whole_adapters_raise(rank_pool):
    rank_pool.run(refusals_on_ranks, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"components": ["text_encoder"]}, ValueError, "pipe.text_encoder, .*CLIPTextModel"),
        ({}, ValueError, r"'tensor' .*max_tensor_dim_size="),
        ({"offload_policy": CPUOffloadPolicy()}, ValueError, "offload_policy "),
    ],
)
def test_model_without_tensor_plan_or_mesh_is_refused(options, error, message):
    with fake_group(2), pytest.raises(error, match=message):
        shard_weights(flux_pipe(), init_context_parallel_mesh("cpu"), method="tensor", **options)


def test_fsdp_is_refused_on_mesh_with_tensor_ranks(tmp_path):
    with fake_group(4):
        mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
        message = r"mesh .*2 ranks .*'tensor', .*method='tensor'"
        pipe = flux_pipe()
        for refused in (
            lambda: parallelize_pipe(pipe, mesh=mesh, weights="fsdp"),
            lambda: shard_weights(pipe, mesh),
            # The folder is empty, so the refusal comes before loading.
            lambda: from_pretrained_sharded(FluxPipeline, tmp_path, mesh=mesh, weights="fsdp"),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
        assert mesh_of(pipe) is None
        with pytest.raises(ValueError, match=r"needs .*'tensor'"):
            from_pretrained_sharded(FluxPipeline, tmp_path, mesh=init_context_parallel_mesh("cpu"), weights="tensor")


def test_the_tensor_dim_takes_neighbours():
    with fake_group(8):
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2, max_tensor_dim_size=2)
        assert mesh.mesh_dim_names == ("batch", "ring", "ulysses", "tensor")
        assert tuple(mesh.mesh.shape) == (1, 2, 2, 2)
        assert mesh["tensor"].mesh.tolist() == [0, 1]
        with pytest.raises(ValueError, match=r"max_tensor_dim_size .*0; .*1"):
            init_context_parallel_mesh("cpu", max_tensor_dim_size=0)


# -- Gradients.


def gradients_of_inputs(name, ranks):
    """Return the gradients of the tokens of a call. With ``ranks=1`` the model is unmodified."""
    transformer = build(name).requires_grad_(False)
    if ranks > 1:
        shard_tensors(transformer, tensor_plan_for(transformer), init_device_mesh("cpu", (ranks,)))
    inputs = MODELS[name].inputs(*SIZES[0])
    # Z-Image takes lists of tokens under other names.
    tokens = [inputs.get(key) for key in ("hidden_states", "encoder_hidden_states", "x", "cap_feats")]
    wanted = [x.requires_grad_() for x in tree_leaves(tokens) if isinstance(x, Tensor)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="In CPU autocast")
        out = torch.cat([x.flatten() for x in tree_leaves(transformer(**inputs, return_dict=False))])
    (out * torch.arange(out.numel()).sin()).sum().backward()
    return [x.grad for x in wanted]


# Gradients of these weights are refused.
TRAINED = {"wan, image context": "blocks.0.attn2.to_k.bias", "flux": "transformer_blocks.0.attn.norm_q.weight"}


def gradients_on_ranks(names):
    """Return the gradients of inputs, and the outputs of models of which a weight wants a gradient."""
    gradients, outs = {}, {}
    for name in names:
        heartbeat()
        gradients[name] = gradients_of_inputs(name, 2)
    for name, weight in TRAINED.items():
        transformer = build(name).requires_grad_(False)
        shard_tensors(transformer, tensor_plan_for(transformer), init_device_mesh("cpu", (2,)))
        transformer.get_parameter(weight).requires_grad_()
        outs[name] = call(transformer, name, SIZES[0])[0]
        with pytest.raises(RuntimeError, match=rf"{weight}.*fsdp"):
            transformer(**MODELS[name].inputs(*SIZES[0]))
    return gradients, outs


def test_gradients_of_inputs_are_exact_and_those_of_weights_are_refused(rank_pool):
    expected = {name: gradients_of_inputs(name, 1) for name in DEFAULT_ON_TWO}
    for gradients, outs in rank_pool.run(gradients_on_ranks, 2, DEFAULT_ON_TWO):
        for name, wanted in expected.items():
            errors = [relative_error(x, y) for x, y in zip(gradients[name], wanted, strict=True)]
            assert len(errors) >= 2 and max(errors) < 1e-5, (name, errors)
        for name, out in outs.items():
            assert relative_error(out, computed_alone(name)[0][0]) < 1e-5, name
