"""LoRAs of peft on the models of a pipeline: layers, weights, and the text and fingerprint that ranks compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import starmap
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.distributed.fingerprints import fingerprints
from para_core.instance_patching import uncompiled
from para_core.torch_internals import version_of as version_of_tensor
from para_core.weights.subclasses import consists_of_tensors, plain_tensors


def models_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules among the components of ``pipe`` by name, without the wrappers of ``torch.compile``."""
    for name, component in getattr(pipe, "components", {}).items():
        if isinstance(component, nn.Module):
            yield name, uncompiled(component)


@dataclass(frozen=True)
class _Weight:
    """Identity and version of a weight when it was described.

    It holds no reference to the tensor. PyTorch does not swap the content of a tensor with weak references
    (``Module.to`` does that), and a strong reference would keep a removed LoRA in memory.
    """

    owner: ref[nn.Module]
    number: int
    version: int
    pointers: tuple[int, ...]

    @classmethod
    def of(cls, owner: nn.Module, x: Tensor) -> _Weight:
        # Sharded weights are not compared, so their address does not matter.
        pointers = () if isinstance(x, DTensor) else tuple(inner.data_ptr() for inner in plain_tensors(x))
        return cls(ref(owner), id(x), version_of(x), pointers)

    def is_still(self, owner: nn.Module, x: Tensor) -> bool:
        """Whether ``x`` is certainly the described weight, unchanged since."""
        return self.owner() is owner and is_version(x, self.version) and self == _Weight.of(owner, x)


class Loras:
    """Descriptions of the LoRA layers of one pipeline's models, made again only if the layers changed."""

    def __init__(self) -> None:
        # For each model the settings of its layers, its weights, and the text.
        self._descriptions: dict[str, tuple[list[str], list[_Weight], str]] = {}

    def described(self, pipe: Any) -> dict[str, str]:
        """Return for each model with LoRAs a text: active adapters, scales, and a fingerprint of the weights.

        Weights that another stage holds count as they were when this rank freed them. The fingerprint excludes sharded
        weights, because they differ between ranks, weights that an offload keeps elsewhere, weights fused into those of
        the model, and weights that were quantized after stages freed them on some ranks.
        """
        for name, model in models_of(pipe):
            layers = lora_layers(model)
            if not layers:
                self._descriptions.pop(name, None)
            elif not self._is_current(name, layers):
                settings, weights = _settings_of(layers), _weights_of(layers)
                counted = _counted([x for _, x in weights], model)
                text = f"{'; '.join(sorted(set(settings)))}, weights {fingerprint(counted)}"
                self._descriptions[name] = settings, [_Weight.of(*weight) for weight in weights], text
        return {f"LoRA of pipe.{name}": text for name, (_, _, text) in self._descriptions.items()}

    def changed(self, pipe: Any) -> bool:
        """Whether :meth:`described` may return other texts than at its last call. Reads no values of weights."""
        models = {name: layers for name, model in models_of(pipe) if (layers := lora_layers(model))}
        return models.keys() != self._descriptions.keys() or not all(starmap(self._is_current, models.items()))

    def _is_current(self, name: str, layers: list[Any]) -> bool:
        if name not in self._descriptions:
            return False
        settings, described, _ = self._descriptions[name]
        weights = _weights_of(layers)
        if settings != _settings_of(layers) or len(weights) != len(described):
            return False
        return all(before.is_still(*weight) for before, weight in zip(described, weights, strict=True))


_NO_VERSION = -1


def version_of(x: Tensor) -> int:
    """Return a number for :func:`is_version` that grows with each write to ``x``."""
    return _NO_VERSION if x.is_inference() else version_of_tensor(x)


def is_version(x: Tensor, version: int) -> bool:
    """Whether ``x`` is certainly unchanged since it had ``version``.

    False for tensors of ``torch.inference_mode``, which have none.
    """
    return version != _NO_VERSION and version_of(x) == version


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers of ``model`` that peft wrapped with adapters (LoRA, LoKr, …)."""
    # peft lists its adapters here. Without the list there is none, and the modules need not be searched.
    if not getattr(model, "peft_config", None):
        return []
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names") and hasattr(module, "merge")]


def lora_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the adapters of ``model``, without those of the wrapped layers."""
    return [weight for _, weight in _weights_of(lora_layers(model))]


def _settings_of(layers: list[Any]) -> list[str]:
    return [
        f"active {[] if layer.disable_adapters else layer.active_adapters}, scales "
        f"{dict(getattr(layer, 'scaling', {}))}, fused {list(layer.merged_adapters)}"
        for layer in layers
    ]


def _weights_of(layers: list[Any]) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return the weights of all adapters of ``layers``, each with the module that holds it."""
    return [
        (owner, weight)
        for layer in layers
        for name in layer.adapter_layer_names
        for owner in getattr(layer, name).modules()
        for weight in owner.parameters(recurse=False)
    ]


def _counted(weights: list[Any], model: nn.Module) -> list[Any]:
    """Return the weights that all ranks can compare.

    Stages free the weights of other stages' blocks and keep their bits. The bits of a weight that was quantized later
    are on one rank only.
    """
    if not any(x.is_meta for x in model.parameters()):
        return weights
    return [x for x in weights if not consists_of_tensors(x)]


# -- fingerprints

# Attribute of a weight on the meta device: the fingerprints of the tensors of the freed weight.
_BITS = "_para_core_bits"


def keep_bits(weight: Tensor, stand_in: Tensor) -> None:
    """Make a :func:`fingerprint` treat ``stand_in``, on the meta device, as ``weight``, which is to be freed."""
    setattr(stand_in, _BITS, fingerprints(_compared(weight)))


def fingerprint(tensors: list[Any]) -> str:
    """Return 16 hexadecimal digits that depend on every bit of ``tensors`` and on their order, but not on the device.

    Excludes sharded tensors, and tensors on the meta device unless :func:`keep_bits` was called for them.
    """
    parts = [part for x in tensors for part in (getattr(x, _BITS, ()) if x.is_meta else _compared(x))]
    digits = iter(fingerprints([part for part in parts if isinstance(part, Tensor)]))
    joined = "".join(next(digits) if isinstance(part, Tensor) else part for part in parts)
    return blake2b(joined.encode(), digest_size=8).hexdigest()


def _compared(x: Tensor) -> list[Tensor]:
    """Return the plain tensors inside ``x``, without those that are sharded or on the meta device."""
    if isinstance(x, DTensor):
        return []
    return [inner for inner in plain_tensors(x.detach()) if not isinstance(inner, DTensor) and not inner.is_meta]
