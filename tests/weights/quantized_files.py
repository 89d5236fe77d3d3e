"""Quantized files of a tiny FLUX as people download them, written and loaded as diffusers' documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig, TorchAoConfig
from diffusers.quantizers.bfl.utils import BFLNVFP4Linear, quantize_nvfp4
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig

from tests.tiny import flux_transformer

BITS_4, BITS_8 = "bitsandbytes 4 bits", "bitsandbytes 8 bits"
CONFIG = "config"
BLOCKS = ("transformer_blocks", "single_transformer_blocks")


class LowRankLinear(nn.Module):
    """A stand-in for the layer of Nunchaku: two 4-bit weights in a byte, a scale per row, and a product of low rank."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        weight = linear.weight.detach()
        left, values, right = torch.linalg.svd(weight)
        up, down = left[:, :rank] * values[:rank], right[:rank]
        rest = weight - up @ down
        scales = rest.abs().amax(1, keepdim=True) / 7
        codes = (rest / scales).round().clamp(-7, 7).to(torch.int16) + 8
        self.qweight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), requires_grad=False)
        self.wscales, self.proj_up, self.proj_down = (
            nn.Parameter(x.contiguous(), requires_grad=False) for x in (scales, up, down)
        )
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack((self.qweight // 16, self.qweight % 16), -1).flatten(1).to(x.dtype) - 8
        return F.linear(x, codes * self.wscales, self.bias) + F.linear(F.linear(x, self.proj_down), self.proj_up)


def require_package(kind: str) -> None:
    """Skip the test if the package that reads files of ``kind`` is not installed."""
    package = {"gguf": "gguf", BITS_4: "bitsandbytes", BITS_8: "bitsandbytes"}.get(kind)
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")


def write(kind: str, folder: Path) -> None:
    """Write the file of ``kind`` and the config of the model next to it."""
    transformer = flux_transformer()
    transformer.save_pretrained(folder / CONFIG)
    if kind == "gguf":
        _write_gguf(transformer, folder / "flux-Q8_0.gguf")
    if kind == "fp8":
        weights = {name: x.to(torch.float8_e4m3fn) for name, x in transformer.state_dict().items()}
        save_file(weights, folder / "flux-fp8.safetensors")
    if kind == "torchao":
        config = TorchAoConfig(Int8WeightOnlyConfig())
        loaded = FluxTransformer2DModel.from_pretrained(folder / CONFIG, quantization_config=config)
        loaded.save_pretrained(folder / kind, safe_serialization=False)


def _write_gguf(transformer: nn.Module, path: Path) -> None:
    import gguf

    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(path, "flux")
    for name, x in transformer.state_dict().items():
        values = x.numpy()
        # Q8_0 shares a scale between 32 values of a row.
        if x.ndim == 2 and x.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values, raw_dtype=f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(kind: str, folder: Path) -> FluxTransformer2DModel:
    """Load the file of ``kind``, to compute in float32."""
    config: dict[str, Any] = {"config": str(folder / CONFIG), "dtype": torch.float32}
    if kind == "gguf":
        quantization = GGUFQuantizationConfig(compute_dtype=torch.float32)
        path = str(folder / "flux-Q8_0.gguf")
        return FluxTransformer2DModel.from_single_file(path, quantization_config=quantization, **config)
    if kind == "fp8":
        transformer = FluxTransformer2DModel.from_single_file(str(folder / "flux-fp8.safetensors"), **config)
        # The weights stay in 8 bits, and each layer casts its own while it computes.
        transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        return transformer
    if kind == "torchao":
        return FluxTransformer2DModel.from_pretrained(folder / kind, use_safetensors=False, dtype=torch.float32)
    transformer = flux_transformer()
    # diffusers loads the other kinds on a GPU only, so their layers replace those of the model here.
    for name in BLOCKS:
        for path, layer in list(transformer.get_submodule(name).named_modules(prefix=name)):
            if isinstance(layer, nn.Linear):
                owner, _, attribute = path.rpartition(".")
                setattr(transformer.get_submodule(owner), attribute, _replacement(kind, layer))
    return transformer


def _replacement(kind: str, linear: nn.Linear) -> nn.Module:
    if kind == "nunchaku":
        return LowRankLinear(linear)
    if kind == "nvfp4":
        weight, scale, global_scale = quantize_nvfp4(linear.weight.detach())
        packed = BFLNVFP4Linear(linear.in_features, linear.out_features, linear.bias is not None, torch.float32)
        packed.weight.data.copy_(weight)
        packed.bias = linear.bias
        for name, x in {"weight_scale": scale, "weight_scale_2": global_scale, "input_scale": torch.ones(())}.items():
            getattr(packed, name).copy_(x)
        return packed
    from bitsandbytes import nn as bnb

    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    if kind == BITS_4:
        layer = bnb.Linear4bit(*sizes, bias=has_bias, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = bnb.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
        layer.bias = linear.bias
    else:
        layer = bnb.Linear8bitLt(*sizes, bias=has_bias, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
    # The layer quantizes its weight when it moves to a device.
    return layer.to("cpu")
