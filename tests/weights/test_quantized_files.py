"""Quantized files, and pipelines that torchao quantizes at loading, are exact on ranks, or refused with a reason."""

from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel, GGUFQuantizationConfig
from diffusers.quantizers.bfl.utils import BFLNVFP4Linear, quantize_nvfp4
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

from para_core.adapters import apply_cache_on_pipe, from_pretrained_sharded, parallelize_pipe, unparallelize_pipe
from para_core.adapters.inspect.block_stack import stack_of
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.quantize import loading_config, quantize_transformers, torchao_config
from para_core.option_values import check_quantize_fits
from para_core.weights.fsdp import check_shardable
from para_core.weights.stages import check_freeable
from para_core.weights.tensor_checks import check_tensor_plan
from tests.rank_pool import heartbeat
from tests.tiny import flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import add_lora, generate, make, mesh_of, write_gguf

# diffusers loads all but the first two on a GPU only, so their layers replace those of the model here.
KINDS = ("gguf", "fp8", "bitsandbytes", "bitsandbytes, 8 bits", "nunchaku", "nvfp4")


@pytest.fixture
def folder(kind, tmp_path):
    """Write the file of ``kind`` and the config of the model next to it, as diffusers' documentation says."""
    package = kind.partition(",")[0]
    if package in ("gguf", "bitsandbytes"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    transformer = flux_transformer()
    transformer.save_pretrained(tmp_path / "config")
    if kind == "gguf":
        write_gguf(transformer, tmp_path / "flux-Q8_0.gguf")
    if kind == "fp8":
        weights = {name: x.to(torch.float8_e4m3fn) for name, x in transformer.state_dict().items()}
        save_file(weights, tmp_path / "flux-fp8.safetensors")
    return tmp_path


def load(kind, folder):
    """Load the file of ``kind``, to compute in float32."""
    config = {"config": str(folder / "config"), "dtype": torch.float32}
    if kind == "gguf":
        quantization = GGUFQuantizationConfig(compute_dtype=torch.float32)
        path = str(folder / "flux-Q8_0.gguf")
        return FluxTransformer2DModel.from_single_file(path, quantization_config=quantization, **config)
    if kind == "fp8":
        transformer = FluxTransformer2DModel.from_single_file(str(folder / "flux-fp8.safetensors"), **config)
        # The weights stay in 8 bits, and each layer casts its own while it computes.
        transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return transformer
    transformer = flux_transformer()
    for blocks in (transformer.transformer_blocks, transformer.single_transformer_blocks):
        for path, layer in list(blocks.named_modules()):
            if isinstance(layer, nn.Linear):
                blocks.set_submodule(path, quantized_layer(kind, layer))
    return transformer


class LowRankLinear(nn.Module):
    """A stand-in for the layer of Nunchaku: integers, a scale per row, and a product of low rank."""

    def __init__(self, linear, rank=4):
        super().__init__()
        left, values, right = torch.linalg.svd(linear.weight.detach())
        up, down = left[:, :rank] * values[:rank], right[:rank]
        rest = linear.weight.detach() - up @ down
        scales = rest.abs().amax(1, keepdim=True) / 7
        parts = {"qweight": ((rest / scales).round() + 8).to(torch.uint8), "wscales": scales, "up": up, "down": down}
        for name, x in parts.items():
            self.register_parameter(name, nn.Parameter(x.contiguous(), requires_grad=False))
        self.bias, self.in_features, self.out_features = linear.bias, linear.in_features, linear.out_features

    def forward(self, x):
        weight = (self.qweight.to(x.dtype) - 8) * self.wscales
        return F.linear(x, weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


def quantized_layer(kind, linear):
    if kind == "nunchaku":
        return LowRankLinear(linear)
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    if kind == "nvfp4":
        weight, scale, global_scale = quantize_nvfp4(linear.weight.detach())
        layer = BFLNVFP4Linear(*sizes, has_bias, torch.float32)
        layer.weight.data.copy_(weight)
        layer.bias = linear.bias
        for name, x in {"weight_scale": scale, "weight_scale_2": global_scale, "input_scale": torch.ones(())}.items():
            getattr(layer, name).copy_(x)
        return layer
    from bitsandbytes import nn as bnb

    if kind == "bitsandbytes":
        layer = bnb.Linear4bit(*sizes, bias=has_bias, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = bnb.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
        layer.bias = linear.bias
    else:
        layer = bnb.Linear8bitLt(*sizes, bias=has_bias, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
    # The layer quantizes its weight when it moves to a device.
    return layer.to("cpu")


# Each way has the step of the user, and the mesh and options of parallelize_pipe.
WAYS = {
    "ring, cached": (partial(apply_cache_on_pipe, residual_diff_threshold=10.0, warmup_steps=1), {"ring": 2}, {}),
    "with a LoRA": (add_lora, {"ulysses": 2}, {}),
    "fsdp": (lambda pipe: None, {"ulysses": 2}, {"weights": "fsdp"}),
    "stages": (lambda pipe: None, {"pipe": 2}, {}),
    "blocks offloaded": (lambda pipe: None, {"ulysses": 2}, {"offload": "blocks"}),
}


# Each kind of file has its exact ways. diffusers loads no LoRA onto weights in fp8, also on one device.
EXACT = {
    "gguf": ("ring, cached", "with a LoRA", "blocks offloaded"),
    "fp8": ("stages", "ring, cached", "blocks offloaded"),
    "bitsandbytes": ("ring, cached", "with a LoRA"),
    "bitsandbytes, 8 bits": ("ring, cached", "with a LoRA"),
    "nunchaku": ("fsdp", "stages", "ring, cached"),
    "nvfp4": ("fsdp", "stages", "ring, cached", "blocks offloaded"),
}


def check_ways(kind, folder):
    """Compare the image of each way, and that after undoing it, with one process."""
    for way in EXACT[kind]:
        heartbeat()
        change, dims, options = WAYS[way]
        pipe, alone = (flux_pipe(shared_parts=False, transformer=load(kind, folder)) for _ in range(2))
        parallelize_pipe(pipe, mesh=mesh_of(dims), **options)
        for each in (pipe, alone):
            change(each)
        expected = generate(alone, "flux", num_inference_steps=3)
        assert relative_error(generate(pipe, "flux", num_inference_steps=3), expected) < 1e-5, way
        # Nothing undoes sharded weights and stages.
        if way not in ("fsdp", "stages"):
            out = generate(unparallelize_pipe(pipe), "flux", num_inference_steps=3)
            assert relative_error(out, expected) < 1e-5, way


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_file_is_exact_on_ranks(rank_pool, kind, folder):
    rank_pool.run(check_ways, 2, kind, folder)


CHECKS = {
    "fsdp": check_shardable,
    "tensor": lambda module: check_tensor_plan(module, tensor_plan_for(module), 2),
    "stages": lambda module: check_freeable(module, stack_of(module)),
    "quantize": lambda module: quantize_transformers(flux_pipe(transformer=module), "int8"),
}
ACCEPTED = {"fp8": ("stages",), "nunchaku": ("fsdp", "stages", "quantize"), "nvfp4": ("fsdp", "stages")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_that_cannot_be_sharded_are_refused(kind, folder):
    transformer = load(kind, folder)
    before = {name: (type(x), x.data_ptr()) for name, x in transformer.named_parameters()}
    for check, refuse in CHECKS.items():
        if check in ACCEPTED.get(kind, ()):
            if check != "quantize":
                refuse(transformer)
            continue
        with pytest.raises(ValueError, match=r"transformer_blocks\.0|time_text_embed"):
            refuse(transformer)
        assert {name: (type(x), x.data_ptr()) for name, x in transformer.named_parameters()} == before


@pytest.fixture(scope="module")
def whole_pipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    make("flux").save_pretrained(path)
    return path


def quantized_alone(whole_pipe, scheme, weights):
    pipe = FluxPipeline.from_pretrained(whole_pipe, dtype=torch.float32)
    if weights == "fsdp":
        quantize_(pipe.transformer.transformer_blocks, int8_weight_only_quantized_training())
        quantize_(pipe.transformer.single_transformer_blocks, int8_weight_only_quantized_training())
    else:
        quantize_(pipe.transformer, torchao_config(scheme))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_quantized(whole_pipe, scheme, weights, dims, placement):
    mesh = mesh_of(dims)
    if weights is None:
        pipe = FluxPipeline.from_pretrained(whole_pipe, dtype=torch.float32, quantization_config=loading_config(scheme))
    else:
        sharding = {"mesh": mesh, "weights": weights, "quantize": scheme}
        pipe = from_pretrained_sharded(FluxPipeline, whole_pipe, dtype=torch.float32, **sharding)
    pipe.set_progress_bar_config(disable=True)
    parallelize_pipe(pipe, mesh=mesh, text_encoders=placement)
    return [generate(pipe, "flux") for _ in range(2)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("scheme", "weights", "dims", "placement"),
    [
        ("int8", None, {"ulysses": 2}, "offload"),
        ("fp8", None, {"ring": 2}, "first"),
        ("int8", "fsdp", {"ulysses": 2}, None),
        ("int8", "tensor", {"tensor": 2}, "first"),
        ("fp8", "tensor", {"tensor": 2}, None),
        ("int8", "stages", {"pipe": 2}, "offload"),
        ("fp8", "stages", {"pipe": 2}, None),
    ],
)
def test_quantized_weights_equal_one_process(rank_pool, whole_pipe, scheme, weights, dims, placement):
    expected = generate(quantized_alone(whole_pipe, scheme, weights), "flux")
    for outs in rank_pool.run(load_quantized, prod(dims.values()), whole_pipe, scheme, weights, dims, placement):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


def test_a_scheme_that_does_not_go_with_the_sharding_is_refused():
    for scheme, weights in (("fp8", "fsdp"), ("int8-dynamic", "fsdp"), ("int8-dynamic", "tensor"), ("int4", None)):
        with pytest.raises(ValueError, match="quantize"):
            check_quantize_fits(scheme, weights)


def test_quantizing_changes_the_result(whole_pipe):
    expected = generate(make("flux"), "flux")
    for scheme in ("int8", "fp8", "int8-dynamic"):
        assert 1e-3 < relative_error(generate(quantized_alone(whole_pipe, scheme, None), "flux"), expected) < 0.2
