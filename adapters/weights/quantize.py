"""Quantize transformers with torchao.

``adapters/parallel/load_sharded.py`` and ``fleet/build.py`` call it through ``require_quantizer()`` of
``features.py``. How quantized weights are sharded and moved is in ``para_core/weights/parameters.py``. Tests:
tests/weights/test_load.py, tests/weights/test_quantized_files.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.registry import USUAL_NAMES, transformers_of
from para_core.adapters.weights.feature import Feature, Quantizer
from para_core.option_values import Quantize
from para_core.weights.parameters import is_float8, is_plain_weight


def torchao_config(scheme: Quantize) -> Any:
    """Return the torchao config of ``scheme``, a value of ``quantize=``. Each row of a weight has its own
    scale.

    ``"int8"`` and ``"fp8"`` quantize the weights only. The schemes with ``"-dynamic"`` also quantize the
    inputs of linear layers at run time, with one scale per token. Raises ``ImportError`` if torchao is not
    installed. It does not validate ``scheme``: the declared option has done that.
    """
    try:
        from torchao import quantization
    except ImportError as error:
        raise ImportError(
            f"quantize={scheme!r} needs torchao >= 0.18: pip install 'para_core[quantize]', in a checkout "
            "pip install '.[quantize]'."
        ) from error
    if scheme == "fp8-dynamic":
        return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    if scheme == "int8-dynamic":
        return quantization.Int8DynamicActivationInt8WeightConfig()
    if scheme == "int8":
        return quantization.Int8WeightOnlyConfig()
    return quantization.Float8WeightOnlyConfig()


def quantize_transformers(pipe: Any, scheme: Quantize, *, gatherable: bool = False) -> None:
    """Quantize the linear layers of each transformer of ``pipe`` in place, except those of LoRAs.

    Weights that are sharded by tensor parallelism keep one scale per whole row, so the result does not depend
    on the number of ranks. Raises ``ValueError``, before it changes a layer, if one is quantized already.

    With ``gatherable``, for ``scheme="int8"`` before FSDP2 shards, torchao's format for int8 training is
    used, whose tensors have the ``fsdp_pre_all_gather`` that FSDP2 requires (:func:`check_shardable`). It
    rounds differently from ``"int8"`` without FSDP2, and only layers inside the blocks are quantized.
    ``scheme`` then only appears in errors: ``check_quantize_fits`` (``para_core/option_values.py``) has
    refused the others.
    """
    from torchao.quantization import quantize_

    config = torchao_config(scheme)
    modules: list[nn.Module] = list(transformers_of(pipe).values())
    for name, transformer in transformers_of(pipe).items():
        _check_unquantized(transformer, name, scheme)
    if gatherable:
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training

        config = int8_weight_only_quantized_training()
        # Quantize the blocks only. FSDP2 leaves small weights outside of them unsharded, and
        # check_late_quantization would take such a quantized weight for one that was quantized after
        # sharding.
        modules = [block for module in modules for block in blocks_of(module)]
    for module in modules:
        quantize_(module, config, filter_fn=_is_linear_of_model)


def loading_config(scheme: Quantize, names: Iterable[str] = USUAL_NAMES) -> Any:
    """Return the ``quantization_config`` of ``from_pretrained`` that quantizes the components ``names`` on
    loading.
    """
    from diffusers import PipelineQuantizationConfig, TorchAoConfig

    return PipelineQuantizationConfig(
        quant_mapping={name: TorchAoConfig(torchao_config(scheme)) for name in names}
    )


def cast_linears(module: nn.Module, dtype: torch.dtype, kept: set[str]) -> None:
    """Cast the weights of linear layers to ``dtype`` before they are quantized, except in modules named in
    ``kept``.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not kept & set(path.split(".")):
            layer.to(dtype)


def _check_unquantized(transformer: nn.Module, name: str, scheme: Quantize) -> None:
    """Raise ``ValueError`` if a linear layer is quantized. torchao would fail too, but only after it changed
    others.
    """
    for path, layer in transformer.named_modules():
        if not _is_linear_of_model(layer, path):
            continue
        weight: Any = layer.weight
        is_plain = is_plain_weight(weight) or isinstance(weight, DTensor)
        if not weight.is_floating_point() or is_float8(weight) or not is_plain:
            kind = str(weight.dtype) if is_plain else type(weight).__name__
            raise ValueError(
                f"quantize={scheme!r}: the weight of {path} in pipe.{name} is quantized already ({kind}); "
                "expected 16 or 32 bits. Leave quantize out, or load the original weights."
            )


def _is_linear_of_model(module: nn.Module, path: str) -> bool:
    """Whether ``module`` is a linear layer, and none that peft added for a LoRA (``lora_A``, ``lora_B``)."""
    return isinstance(module, nn.Linear) and "lora_" not in path


FEATURE = Feature(
    quantizer=Quantizer(
        check_scheme=torchao_config,
        quantize=quantize_transformers,
        loading_config=loading_config,
        cast_linears=cast_linears,
    )
)
