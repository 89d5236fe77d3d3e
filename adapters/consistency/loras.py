"""LoRAs (peft's) on the models of a pipeline: their layers and weights, and a text and a fingerprint by which ranks compare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.instance_patching import uncompiled
from para_core.torch_internals import version_of as version_of_tensor
from para_core.weights.subclasses import consists_of_tensors, plain_tensors

# Smaller than 2^16 and prime: weights of elements in a fingerprint repeat after so many.
_PERIOD = 65521
# Elements of a fingerprint at a time: their integers take 16 bytes each.
_AT_ONCE = 1 << 24


def models_of(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """The components of ``pipe`` that are modules, by name, as they were before ``torch.compile``."""
    for name, component in getattr(pipe, "components", {}).items():
        if isinstance(component, nn.Module):
            yield name, uncompiled(component)


@dataclass(frozen=True)
class _Weight:
    """A weight as it was when it was described. It holds no reference to the tensor itself: of a tensor with weak references PyTorch swaps
    no content (``Module.to`` does that), and a strong one would keep a LoRA that was removed in memory."""

    owner: ref[nn.Module]
    number: int
    version: int
    pointers: tuple[int, ...]

    @classmethod
    def of(cls, owner: nn.Module, x: Tensor) -> _Weight:
        # A sharded weight does not count, wherever it lies.
        pointers = () if isinstance(x, DTensor) else tuple(inner.data_ptr() for inner in plain_tensors(x))
        return cls(ref(owner), id(x), version_of(x), pointers)

    def is_still(self, owner: nn.Module, x: Tensor) -> bool:
        """Whether ``x`` is certainly this weight, and was not written to."""
        return self.owner() is owner and is_version(x, self.version) and self == _Weight.of(owner, x)


class Loras:
    """The LoRA layers (peft's) of one pipeline's models, described anew where they have changed only."""

    def __init__(self) -> None:
        # Of each model: how its layers were set, its weights, and the text.
        self._known: dict[str, tuple[list[str], list[_Weight], str]] = {}

    def described(self, pipe: Any) -> dict[str, str]:
        """By model, which adapters are active, how strongly, and a fingerprint of their weights.

        Weights that another stage holds count as they were when this rank freed them. Left out are weights that are sharded, for they
        differ from rank to rank, that an offload keeps elsewhere, that were fused into those of the model, and that were quantized after
        stages freed them on some ranks.
        """
        for name, model in models_of(pipe):
            layers = lora_layers(model)
            if not layers:
                self._known.pop(name, None)
            elif not self._is_known(name, layers):
                settings, weights = _settings_of(layers), _weights_of(layers)
                counted = _counted([x for _, x in weights], model)
                text = f"{'; '.join(sorted(set(settings)))}, weights {fingerprint(counted):x}"
                self._known[name] = settings, [_Weight.of(*weight) for weight in weights], text
        return {f"LoRA of pipe.{name}": text for name, (_, _, text) in self._known.items()}

    def changed(self, pipe: Any) -> bool:
        """Whether :meth:`described` may give something else than when it was called last; takes no look at a weight's values."""
        found = {name: layers for name, model in models_of(pipe) if (layers := lora_layers(model))}
        return found.keys() != self._known.keys() or not all(self._is_known(*one) for one in found.items())

    def _is_known(self, name: str, layers: list[Any]) -> bool:
        if name not in self._known:
            return False
        settings, known, _ = self._known[name]
        weights = _weights_of(layers)
        if settings != _settings_of(layers) or len(weights) != len(known):
            return False
        return all(before.is_still(*weight) for before, weight in zip(known, weights, strict=True))


_NO_VERSION = -1


def version_of(x: Tensor) -> int:
    """A number that grows when ``x`` is written to, for :func:`is_version`."""
    return _NO_VERSION if x.is_inference() else version_of_tensor(x)


def is_version(x: Tensor, version: int) -> bool:
    """Whether ``x`` was certainly not written to since it had this version; in ``torch.inference_mode`` nobody counts."""
    return version != _NO_VERSION and version_of(x) == version


def lora_layers(model: nn.Module) -> list[Any]:
    """The layers of ``model`` that peft's adapters (LoRA, LoKr, …) are around."""
    # Its own list of adapters: without it there is none, and nothing needs to be walked.
    if not getattr(model, "peft_config", None):
        return []
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names") and hasattr(module, "merge")]


def lora_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the adapters of ``model``, without those of the layers that they are around."""
    return [weight for _, weight in _weights_of(lora_layers(model))]


def _settings_of(layers: list[Any]) -> list[str]:
    return [_lora_setting(layer) for layer in layers]


def _weights_of(layers: list[Any]) -> list[tuple[nn.Module, nn.Parameter]]:
    return [weight for layer in layers for weight in _weights(layer)]


def _lora_setting(layer: Any) -> str:
    active = [] if layer.disable_adapters else layer.active_adapters
    return f"active {active}, scales {dict(getattr(layer, 'scaling', {}))}, fused {list(layer.merged_adapters)}"


def _weights(layer: Any) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Each with the module that holds it."""
    for name in layer.adapter_layer_names:
        for owner in getattr(layer, name).modules():
            for weight in owner.parameters(recurse=False):
                yield owner, weight


def _counted(weights: list[Any], model: nn.Module) -> list[Any]:
    """Return the weights that ranks can compare.

    Stages free the weights of other stages' blocks and keep their bits, but those of a weight that was quantized since are on one rank only.
    """
    if not any(x.is_meta for x in model.parameters()):
        return weights
    return [x for x in weights if not consists_of_tensors(x)]


# -- fingerprints

# Where a weight on the meta device keeps the bits of the one that was freed.
_BITS = "_para_core_bits"


def keep_bits(weight: Tensor, stand_in: Tensor) -> None:
    """Let ``stand_in``, on the meta device, count in a :func:`fingerprint` as ``weight``, which is to be freed."""
    bits = _bits_of(weight)
    if bits:
        setattr(stand_in, _BITS, [x.item() for x in bits])


def fingerprint(tensors: list[Any]) -> int:
    """64 bits that differ where a bit of ``tensors`` does, but for a coincidence; the same on any device, in whatever order it sums.

    Left out are tensors that are sharded, and those on the meta device, unless :func:`keep_bits` was called for them.
    """
    sums = [bits for x in tensors for bits in _bits_of(x)]
    if not sums:
        return 0
    total = 0
    # One transfer for all tensors of a device.
    for values in torch.stack([x.to(sums[0].device) for x in sums]).tolist():
        total = (total * 1_000_003 + values) % (1 << 64)
    return total


def _bits_of(x: Tensor) -> list[Tensor]:
    """The bits of each tensor that ``x`` consists of."""
    if isinstance(x, DTensor):
        return []
    if x.is_meta:
        return [torch.tensor(bits) for bits in getattr(x, _BITS, ())]
    return [
        _bit_sum(inner) for inner in plain_tensors(x.detach()) if not isinstance(inner, DTensor) and not inner.is_meta
    ]


def _bit_sum(x: Tensor) -> Tensor:
    """The bits of ``x`` as integers, weighted by position, summed modulo 2^64."""
    if x.is_complex():
        x = torch.view_as_real(x)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(-1).view(width)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=x.device) % _PERIOD + 1
        total = total + (part * position).sum()
    return total
