"""Find the LoRAs on a pipeline's models, and describe them by values that ranks compare.

The weights are read in every call, by a digest that the device computes. Nothing cheaper is sound: peft
exchanges a LoRA by writes through ``.data``, which leave object, address and version counter of a weight as
they were.

Nothing is compared here: ``adapters/parallel/call.py``, ``callbacks.py`` and
``adapters/weights/staged_loras.py`` do that. What :func:`lora_weights` finds, FSDP2 does not shard
(``adapters/weights/fsdp_weights.py``), and the merges of :func:`lora_layers` gather sharded weights
(``adapters/weights/lora.py``). Tests: tests/adapters/agree/test_state.py, tests/weights/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.arguments import StageValue
from para_core.adapters.registry import all_components
from para_core.distributed.fingerprints import joint_fingerprint
from para_core.instance.modules import submodules_of, uncompiled
from para_core.weights.parameters import plain_tensors
from para_core.weights.stack import stages_of


def models_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield each component of ``pipe`` that is a module, with its name and without the wrapper of ``torch.compile``."""
    for name, component in all_components(pipe).items():
        if isinstance(component, nn.Module):
            yield name, uncompiled(component)


def describe_loras(pipe: Any) -> dict[str, Any]:
    """Return :func:`describe_loras_of_model` of each model of ``pipe``."""
    values: dict[str, Any] = {}
    for name, model in models_of(pipe):
        values |= describe_loras_of_model(name, model)
    return values


def describe_loras_of_model(name: str, model: nn.Module) -> dict[str, Any]:
    """Return settings and weights of the LoRAs of ``model``, by names for messages; nothing if it has none.

    The settings are a text: active, fused and scaled adapters. The weights are a digest on their device, so
    this does not wait for it. LoRA weights that are sharded or on "meta" (offloaded by accelerate, or of
    other stages) are left out, because not every rank could compare these. With stages the LoRA weights of
    blocks are therefore compared only among the ranks of one stage. The weights of the model itself, into
    which a LoRA may be fused, are not compared here. The copies of whole modules that a LoRA has
    (``modules_to_save``) count as its weights.
    """
    if not _has_adapters(model):
        return {}
    layers = [*lora_layers(model), *_copied_modules(model)]
    if not layers:
        return {}
    what, stages = f"LoRA of pipe.{name}", stages_of(model)
    values: dict[str, Any] = {what: _describe_settings(layers)}
    # Scales are no parameters, so a stage keeps those of other stages' blocks too, and all ranks compare them.
    weights = [*_weights_of(layers), *_scales_of(layers)]
    if stages is not None:
        in_blocks = {id(x) for staged in stages.blocks for x in staged.block.parameters()}
        block_weights = [x for x in weights if id(x) in in_blocks]
        weights = [x for x in weights if id(x) not in in_blocks]
        values[f"{what}, weights of its blocks"] = StageValue(stages.dim.index, _digest(block_weights))
    values[f"{what}, weights"] = _digest(weights)
    return values


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers of ``model`` that peft wrapped with adapters (LoRA, LoKr, …)."""
    if not _has_adapters(model):
        return []
    return merging_layers(model)


def merging_layers(part: nn.Module) -> list[Any]:
    """Return the layers of :func:`lora_layers` in ``part`` of a model that has adapters."""
    # Wrappers of modules_to_save have adapters too, but merge nothing: they are those of _copied_modules.
    return [
        module
        for module in part.modules()
        if hasattr(module, "adapter_layer_names") and hasattr(module, "merge")
    ]


def _has_adapters(model: nn.Module) -> bool:
    """Whether peft has added adapters to ``model``. If not, its layers need not be searched, which takes a
    Python call for each.
    """
    # peft lists its adapters in peft_config of the module that it was given, which may be a part of the model.
    states = [part.__dict__ for part in submodules_of(model)]
    return any(map(dict.__contains__, states, repeat("peft_config")))


def _copied_modules(model: nn.Module) -> list[Any]:
    """Return peft's wrappers of modules that each LoRA replaces by a copy of its own (``modules_to_save``)."""
    wrappers = []
    for module in model.modules():
        if "modules_to_save" in getattr(module, "adapter_layer_names", ()):
            wrappers.append(module)
    return wrappers


def lora_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all LoRAs of ``model``, without the weights of the layers that they adapt and
    without their copies of whole modules (``modules_to_save``).
    """
    return _weights_of(lora_layers(model))


def _describe_settings(layers: list[Any]) -> str:
    """Return the distinct settings of all LoRA layers, and a hash of the settings of each layer."""
    settings = []
    for layer in layers:
        active = layer.active_adapters
        if layer.disable_adapters:
            active = []
        scales = {name: scale for name, scale in _scaling_of(layer).items() if not isinstance(scale, Tensor)}
        settings.append(f"active {active}, scales {scales}, fused {list(layer.merged_adapters)}")
    kinds = sorted(set(settings))
    if len(kinds) == 1:
        return kinds[0]
    return f"{blake2b('; '.join(settings).encode(), digest_size=4).hexdigest()}: {'; '.join(kinds)}"


def _scaling_of(layer: Any) -> dict[str, Any]:
    scaling = getattr(layer, "scaling", None)
    # A wrapper of modules_to_save passes on the attributes of its module, such as a float of this name.
    if not isinstance(scaling, Mapping):
        return {}
    return dict(scaling)


def _scales_of(layers: list[Any]) -> list[Tensor]:
    """Return the scales that are tensors, as those of a LoRA that peft prepared for hotswaps in compiled models."""
    return [x for layer in layers for x in _scaling_of(layer).values() if isinstance(x, Tensor)]


def _weights_of(layers: list[Any]) -> list[nn.Parameter]:
    """Return the weights of all adapters of ``layers``."""
    return [
        weight
        for layer in layers
        for name in layer.adapter_layer_names
        for weight in getattr(layer, name).parameters()
    ]


def _digest(weights: list[Any]) -> Tensor:
    """Return a digest of ``weights`` that depends on every bit; sharded tensors and those on "meta" are left out."""
    parts = [part for x in weights if not isinstance(x, DTensor) for part in plain_tensors(x.detach())]
    return joint_fingerprint([part for part in parts if not part.is_meta and not isinstance(part, DTensor)])
