"""Find the LoRAs on a pipeline's models, and describe them in a text that ranks compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import starmap
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.distributed.consistency import fingerprints
from para_core.instance_patching import uncompiled
from para_core.torch_internals import version_of as version_of_tensor
from para_core.weights.parameters import consists_of_tensors, plain_tensors


def models_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield each component of ``pipe`` that is a module, with its name and without the wrapper of ``torch.compile``."""
    for name, component in getattr(pipe, "components", {}).items():
        if isinstance(component, nn.Module):
            yield name, uncompiled(component)


@dataclass(frozen=True)
class _Weight:
    """Identity and version of a weight, to see later whether it was replaced or written to.

    Holds no reference to the tensor, which would keep a removed LoRA in memory; PyTorch refuses to swap the content of
    a tensor that has weak references, which ``Module.to`` may do.
    """

    owner: ref[nn.Module]
    number: int
    version: int
    pointers: tuple[int, ...]

    @classmethod
    def of(cls, owner: nn.Module, x: Tensor) -> _Weight:
        # Leave out addresses of a sharded weight: its values are not compared, so moving it is no change.
        pointers = () if isinstance(x, DTensor) else tuple(inner.data_ptr() for inner in plain_tensors(x))
        return cls(ref(owner), id(x), version_of(x), pointers)


class Loras:
    """Text descriptions of the LoRAs of one pipeline, computed again only if the LoRAs may have changed."""

    def __init__(self) -> None:
        # By component name: settings of its LoRA layers, identities of their weights, and the text.
        self._descriptions: dict[str, tuple[list[str], list[_Weight], str]] = {}

    def described(self, pipe: Any) -> dict[str, str]:
        """Return a text for each model of ``pipe`` with LoRAs: active adapters, scales, fingerprint of the weights.

        LoRA weights of blocks that belong to another stage are described as they were when this rank freed them. The
        fingerprint leaves out weights that are sharded, offloaded, fused into the model, or quantized after stages
        freed them on other ranks, because not every rank could compare these.
        """
        for name, model in models_of(pipe):
            layers = lora_layers(model)
            if not layers:
                self._descriptions.pop(name, None)
            elif not self._is_current(name, layers):
                settings, weights = _settings_of(layers), _weights_of(layers)
                counted = [x for _, x in weights]
                if any(x.is_meta for x in model.parameters()):
                    # With stages a rank keeps a fingerprint of each LoRA weight that it frees. If a weight was
                    # quantized afterwards, only the rank that holds it has its new values.
                    counted = [x for x in counted if not consists_of_tensors(x)]
                text = f"{'; '.join(sorted(set(settings)))}, weights {fingerprint(counted)}"
                self._descriptions[name] = settings, [_Weight.of(*weight) for weight in weights], text
        return {f"LoRA of pipe.{name}": text for name, (_, _, text) in self._descriptions.items()}

    def changed(self, pipe: Any) -> bool:
        """Whether :meth:`described` may return other texts than at its last call. Cheap: reads no values of weights."""
        models = {name: layers for name, model in models_of(pipe) if (layers := lora_layers(model))}
        return models.keys() != self._descriptions.keys() or not all(starmap(self._is_current, models.items()))

    def _is_current(self, name: str, layers: list[Any]) -> bool:
        if name not in self._descriptions:
            return False
        settings, described, _ = self._descriptions[name]
        weights = _weights_of(layers)
        if settings != _settings_of(layers) or len(weights) != len(described):
            return False
        # An inference tensor has no version, so it may have changed.
        return all(
            before.owner() is owner and is_version(x, before.version) and before == _Weight.of(owner, x)
            for before, (owner, x) in zip(described, weights, strict=True)
        )


_NO_VERSION = -1


def version_of(x: Tensor) -> int:
    """Return a number that grows with each write to ``x``; -1 for a tensor made in ``torch.inference_mode``."""
    return _NO_VERSION if x.is_inference() else version_of_tensor(x)


def is_version(x: Tensor, version: int) -> bool:
    """Whether ``x`` is certainly unchanged since :func:`version_of` gave ``version``. False for inference tensors."""
    return version != _NO_VERSION and version_of(x) == version


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers of ``model`` that peft wrapped with adapters (LoRA, LoKr, …)."""
    # peft lists its adapters in peft_config, so without an entry there the modules need not be searched.
    if not getattr(model, "peft_config", None):
        return []
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names") and hasattr(module, "merge")]


def lora_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all LoRAs of ``model``, without the weights of the layers that they adapt."""
    return [weight for _, weight in _weights_of(lora_layers(model))]


def _settings_of(layers: list[Any]) -> list[str]:
    return [
        f"active {[] if layer.disable_adapters else layer.active_adapters}, scales "
        f"{dict(getattr(layer, 'scaling', {}))}, fused {list(layer.merged_adapters)}"
        for layer in layers
    ]


def _weights_of(layers: list[Any]) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return the weights of all adapters of ``layers``, each with the submodule that holds it."""
    return [
        (owner, weight)
        for layer in layers
        for name in layer.adapter_layer_names
        for owner in getattr(layer, name).modules()
        for weight in owner.parameters(recurse=False)
    ]


# Attribute that :func:`keep_bits` sets on a weight on the meta device: fingerprints of the tensors that were freed.
_BITS = "_para_core_bits"


def keep_bits(weight: Tensor, stand_in: Tensor) -> None:
    """Store the fingerprint of ``weight`` on ``stand_in``, the meta tensor that replaces it when it is freed.

    :func:`fingerprint` then gives the same digits for ``stand_in`` as for ``weight``.
    """
    setattr(stand_in, _BITS, fingerprints(_compared(weight)))


def fingerprint(tensors: list[Any]) -> str:
    """Return 16 hexadecimal digits that depend on every bit of ``tensors`` and on their order, but not on the device.

    Leaves out sharded tensors, and tensors on the meta device unless :func:`keep_bits` was called for them.
    """
    parts = [part for x in tensors for part in (getattr(x, _BITS, ()) if x.is_meta else _compared(x))]
    digits = iter(fingerprints([part for part in parts if isinstance(part, Tensor)]))
    joined = "".join(next(digits) if isinstance(part, Tensor) else part for part in parts)
    return blake2b(joined.encode(), digest_size=8).hexdigest()


def _compared(x: Tensor) -> list[Tensor]:
    """Return the plain tensors that ``x`` consists of, for the fingerprint. Sharded and meta tensors are left out."""
    if isinstance(x, DTensor):
        return []
    return [inner for inner in plain_tensors(x.detach()) if not isinstance(inner, DTensor) and not inner.is_meta]
