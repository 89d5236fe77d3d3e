"""Heads and hidden units sharded over tensor ranks give the result of one device, also with sharded tokens."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline, TensorParallelConfig
from diffusers.hooks import tensor_parallel
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from peft import LoHaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torchao.quantization import Int8WeightOnlyConfig, quantize_

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
from para_core.adapters.models.flux import FLUX
from para_core.adapters.registry import tensor_plan_for
from para_core.weights.tensor import shard_tensors
from para_core.weights.tensor_checks import check_tensor_plan
from para_core.weights.tensor_plan import Linear, TensorPlan, planned_counts
from tests.adapters.parallel.unchanged import same_pipe
from tests.adapters.test_transformers import call
from tests.instance.test_record import Doubled
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import bytes_of, generate, make, mesh_of
from zoo.tiny.transformers.registry import MODELS

# Four ranks can share these heads. Models that are not listed need no other sizes.
HEADS = {"num_attention_heads": 4}
CONFIGS = {
    "wan, image context": {**HEADS, "added_kv_proj_dim": 128},
    "ltx": {**HEADS, "cross_attention_dim": 128},
    # The numbers of hidden units, 8 / 3 of the width, are divisible too.
    "z-image": {"n_heads": 4, "n_kv_heads": 4, "axes_dims": (8, 8, 8)},
    "mochi": {"num_attention_heads": 12, "attention_head_dim": 8},
    # The width must be that of the face tokens, and of the ControlNet's residuals.
    "wan animate": {"num_attention_heads": 2, "attention_head_dim": 48},
    "bria": {"num_attention_heads": 6, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "consisid": {"num_attention_heads": 6, "LFE_output_dim": 128},
    "framepack": {**HEADS, "mlp_ratio": 9.0},
}
NAMES = ["flux", "qwen-image, masked", "wan, image context", "hunyuan", "ltx", "z-image", "mochi", "ovis", "flux2"]
NAMES += ["qwen-image", "wan", "hunyuan, image by token replacement", "cogvideox, rotary", "wan vace", "wan animate"]
NAMES += ["skyreels v2", "skyreels v2, causal", "chronoedit", "anyflow", "framepack", "hunyuan 1.5, image", "consisid"]
NAMES += ["qwen-image 2.1", "chroma", "longcat-image", "bria", "bria fibo"]
SIZES = [(3, 6, 10), (1, 6, 6)]


def build(name):
    return MODELS[name].build(**CONFIGS.get(name, HEADS))


def shard_heads(name, shape):
    transformer, alone = build(name), build(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses", "tensor"))
    held = bytes_of(transformer)
    shard_tensors(transformer, tensor_plan_for(transformer), mesh["tensor"])
    parallelize_transformer(transformer, mesh=mesh)
    for size in SIZES:
        for out, expected in zip(call(transformer, name, size), call(alone, name, size), strict=True):
            assert relative_error(out, expected) < 1e-5, size
    # Modulations and layers outside the blocks are replicated, and they are most of so small a model. HunyuanVideo 1.5
    # embeds a second text with 2,048 channels, whatever its size.
    assert bytes_of(transformer) < (0.99 if name == "hunyuan 1.5, image" else 0.9) * held


def shard_by_diffusers(transformer, tensor):
    # diffusers shards on accelerators only, and the tests run on CPUs.
    on_cpu = mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",))
    with on_cpu, mock.patch.object(torch.accelerator, "device_count", return_value=4):
        transformer.enable_parallelism(config=TensorParallelConfig(mesh=tensor))


def generate_over(how, dims):
    """Generate with para_core's plan or with diffusers' sharding, and again with a cache."""
    mesh, pipe, cached = mesh_of(dims), make("flux"), []
    alone = generate(pipe, "flux", num_inference_steps=4)
    held = bytes_of(pipe.transformer)
    if how == "ours":
        parallelize_pipe(pipe, mesh=mesh, weights="tensor")
    else:
        shard_by_diffusers(pipe.transformer, mesh["tensor"])
        for method, other in (("tensor", mesh), ("fsdp", mesh_of({}))):
            with pytest.raises(ValueError, match=r"pipe\.transformer .*diffusers.* weights="):
                shard_weights(pipe, other, method=method)
        parallelize_pipe(pipe, mesh=mesh)
    assert bytes_of(pipe.transformer) < 0.9 * held
    assert relative_error(generate(pipe, "flux", num_inference_steps=4), alone) < 1e-5
    for each in (pipe, make("flux")):
        apply_cache_on_pipe(each, residual_diff_threshold=2.0, max_consecutive_hits=1)
        cached.append(generate(each, "flux", num_inference_steps=4))
    assert relative_error(*cached) < 1e-5
    assert any(row.hit for row in cache_report(pipe).rows)


def refusals_on_ranks():
    mesh, pipe = mesh_of({"tensor": 2}), make("flux")
    parallelize_pipe(pipe, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"heads .* no ranks, .*'tensor' .*\[0, 1\]"):
        generate(pipe, "flux")
    shard_weights(pipe, method="tensor")
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    with pytest.raises(RuntimeError, match=r"heads .*\[0, 1\] .*'tensor' .* none"):
        generate(pipe, "flux")
    for change, message in (
        (lambda model: model.add_adapter(LoHaConfig(target_modules=["to_q"])), "to_q .*loha's Linear, .*fuse_lora"),
        (lambda model: model.fuse_qkv_projections(), r"attn\.to_qkv .* in no tensor plan.*unfuse_qkv_projections\(\)"),
        (lambda model: setattr(model.transformer_blocks[0].attn, "to_q", Doubled(64, 64)), r"0\.attn\.to_q .*Doubled"),
    ):
        pipe = make("flux")
        change(pipe.transformer)
        with same_pipe(pipe), pytest.raises(ValueError, match=message):
            shard_weights(pipe, mesh, method="tensor")
    pipe.transformer = flux_transformer(num_attention_heads=3)
    with pytest.raises(ValueError, match=r"3 heads, .*2 .*max_tensor_dim_size .*\[3\]"):
        shard_weights(pipe, mesh, method="tensor")


FSDP = r"mesh .*2 ranks .*'tensor', .*method='tensor'"


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (1, {"method": "tensor", "components": ["text_encoder"]}, "CLIPTextModel"),
        (1, {"method": "tensor"}, r"'tensor' .*max_tensor_dim_size="),
        (1, {"method": "tensor", "offload_policy": CPUOffloadPolicy()}, "offload_policy "),
        pytest.param(2, {}, FSDP, id="by_fsdp_on_tensor_ranks"),
    ],
)
def test_model_or_mesh_that_does_not_fit_is_refused(size, options, message):
    pipe = flux_pipe()
    with fake_group(4):
        mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=size)
        with pytest.raises(ValueError, match=message):
            shard_weights(pipe, mesh, **options)
        if size == 2:
            with pytest.raises(ValueError, match=FSDP):
                parallelize_pipe(pipe, mesh=mesh, weights="fsdp")
        # The folder is empty, so this is refused before loading.
        with pytest.raises(ValueError, match=FSDP if size == 2 else r"needs .*'tensor'"):
            from_pretrained_sharded(FluxPipeline, ".", mesh=mesh, weights="fsdp" if size == 2 else "tensor")
    assert type(pipe) is FluxPipeline


def test_plan_of_an_own_adapter_is_used():
    feed = {"transformer_blocks.*.ff.net.0.proj": Linear("colwise"), "transformer_blocks.*.ff.net.2": Linear("rowwise")}
    options = {"weights": "tensor", "text_encoders": "replicate", "adapter": replace(FLUX, tensor=TensorPlan(feed))}
    with fake_group(2):
        pipe = parallelize_pipe(flux_pipe(), mesh=mesh_of({"tensor": 2}), **options)
    sharded = {name for name, x in pipe.transformer.named_parameters() if isinstance(x, DTensor)}
    assert sharded and all(".ff.net." in name for name in sharded)
    with pytest.raises(ValueError, match="DTensor"):
        check_tensor_plan(pipe.transformer, TensorPlan(feed), 2)


class Counted(nn.Module):
    def __init__(self, heads=4, units=8, channels=8, own_heads=None, hooked=None):
        super().__init__()
        self.heads = own_heads
        self.attn, self.feed = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attn.heads, self.feed.units = heads, units
        self.norm = nn.RMSNorm(channels)
        if hooked is not None:
            apply_layerwise_casting_hook(getattr(self, hooked), torch.bfloat16, torch.float32, non_blocking=False)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"heads": 1}, {}, r"Counted has 1 head, which 2 tensor ranks cannot share"),
        ({"units": 7}, {}, r"feed of this Counted has units=7, which 2 tensor ranks"),
        ({"channels": 7}, {}, r"norm of this Counted has a weight of the shape \[7\]"),
        ({"own_heads": 4}, {}, r"feed of this Counted is a linear layer of attention .*in no tensor plan"),
        ({"hooked": "attn"}, {}, r"attn of this Counted has a forward of its own"),
        ({"hooked": "norm"}, {}, r"norm of this Counted has a forward of its own"),
        ({}, {"heads": ("feed",)}, r"feed of this Counted has no number 'heads'"),
        ({}, {"heads": "attn"}, r"heads='attn'\): .*heads=\('attn',\)"),
        ({}, {"linears": {"attn": "colwise"}}, r"'attn': 'colwise'.*Linear\('colwise'\)"),
        ({}, {"norms": ("feed",)}, r"feed of this Counted is a Linear .*RMS norms"),
        ({}, {"linears": {"attn": Linear("colwise", (1, 1, 1))}}, r"^attn of this Counted has 8 channels"),
        ({"heads": 16}, {"linears": {"attn": Linear("colwise", parts_from="heads")}}, r"^attn .* has 8 channels"),
        ({}, {"linears": {"attn": Linear("colwise", parts_from="sizes")}}, r"^attn .* has no 'sizes'"),
    ],
)
def test_plan_that_does_not_divide_a_model_is_refused(options, changes, message):
    plan = TensorPlan({"attn": Linear("colwise")}, ("attn", "**.attn"), {"feed": "units"}, ("norm",))
    check_tensor_plan(Counted(), plan, 2)
    assert [name for name, _, _ in planned_counts(Counted(), plan)] == ["attn", "feed"]
    with pytest.raises((TypeError, ValueError), match=message):
        check_tensor_plan(Counted(**options), replace(plan, **changes), 2)
    with pytest.raises(ValueError, match="along='columns'"):
        Linear("columns")


def normalize_in_float64():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Identity()).double(), torch.randn(3, 8).double()
    expected = model(x).detach().chunk(2, -1)[dist.get_rank()]
    # The model holds its layers under two names.
    model[2].layers = nn.ModuleList(model[:2])
    shard_tensors(model, TensorPlan({"**.0": Linear("colwise")}, norms=("**.1",)), init_device_mesh("cpu", (2,)))
    assert relative_error(model(x), expected) < 1e-14


def trace_a_split_text_with_quantized_weights():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(1, 12, 32)
    layers = {"0": Linear("colwise"), "1": Linear("rowwise")}
    shard_tensors(model, TensorPlan(layers), init_device_mesh("cpu", (2,)))
    quantize_(model, Int8WeightOnlyConfig())
    expected = model(x[:, :5])
    # A batch of one keeps the symbolic stride of all tokens.
    run = torch.compile(lambda x: model(x.split([5, x.shape[1] - 5], 1)[0].contiguous()), backend="eager")
    assert all(relative_error(run(x[:, :length].contiguous()), expected) < 1e-6 for length in (8, 12))


# Gradients of these weights are refused.
TRAINED = {"wan, image context": "blocks.0.attn2.to_k.bias", "flux": "transformer_blocks.0.attn.norm_q.weight"}


def check_gradients():
    """Compare the gradients of tokens, and require that those of weights are refused."""
    for name in ("flux", "wan, image context", "z-image", "ovis"):
        gradients = {}
        for ranks in (1, 2):
            transformer = build(name).requires_grad_(False)
            if ranks > 1:
                shard_tensors(transformer, tensor_plan_for(transformer), init_device_mesh("cpu", (ranks,)))
            inputs = MODELS[name].inputs(*SIZES[0])
            # Z-Image takes lists of tokens under other names.
            tokens = [inputs.get(key) for key in ("hidden_states", "encoder_hidden_states", "x", "cap_feats")]
            wanted = [x.requires_grad_() for x in tree_leaves(tokens) if isinstance(x, Tensor)]
            out = torch.cat([x.flatten() for x in tree_leaves(transformer(**inputs, return_dict=False))])
            (out * torch.arange(out.numel()).sin()).sum().backward()
            gradients[ranks] = [x.grad for x in wanted]
        errors = [relative_error(x, y) for x, y in zip(gradients[2], gradients[1], strict=True)]
        assert len(errors) >= 2 and max(errors) < 1e-5, (name, errors)
        if name in TRAINED:
            transformer.get_parameter(TRAINED[name]).requires_grad_()
            assert torch.equal(call(transformer, name, SIZES[0])[0].flatten(), out.detach())
            with pytest.raises(RuntimeError, match=rf"{TRAINED[name]}.*fsdp"):
                transformer(**MODELS[name].inputs(*SIZES[0]))


# Meshes are batch × ring × ulysses × tensor.
@pytest.mark.parametrize(
    ("check", "ranks", "arguments"),
    [
        (shard_heads, 4, ("wan, image context", (1, 1, 2, 2))),
        (shard_heads, 2, ("ltx", (1, 1, 1, 2))),
        *[pytest.param(shard_heads, 2, (name, (1, 1, 1, 2)), marks=pytest.mark.long) for name in NAMES],
        *[pytest.param(shard_heads, 4, (name, (1, 2, 1, 2)), marks=pytest.mark.long) for name in NAMES],
        (generate_over, 2, ("ours", {"tensor": 2})),
        (generate_over, 4, ("diffusers", {"ulysses": 2, "tensor": 2})),
        (refusals_on_ranks, 2, ()),
        (check_gradients, 2, ()),
        (normalize_in_float64, 2, ()),
        (trace_a_split_text_with_quantized_weights, 2, ()),
    ],
)
def test_heads_on_tensor_ranks_are_exact_or_refused(rank_pool, check, ranks, arguments):
    rank_pool.run(check, ranks, *arguments)
