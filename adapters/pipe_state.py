"""What decides, beside its arguments, what a pipeline generates: it must be alike on all ranks of a mesh.

Its scheduler, guider and cache, the dtypes of its models, their LoRAs, and the versions of the packages that run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from weakref import ref

import diffusers
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core import version
from para_core.adapters.caching.generation import caching_of
from para_core.adapters.supported import TRANSFORMERS, transformers_of
from para_core.instance import uncompiled
from para_core.plans.region import plan_options

# Smaller than 2^16 and prime: weights of elements in a fingerprint repeat after so many.
_PERIOD = 65521
# Elements of a fingerprint at a time: their integers take 16 bytes each.
_AT_ONCE = 1 << 24


def pipe_state(pipe: Any, loras: Loras, *, decodes: bool) -> dict[str, Any]:
    """By name, values that are equal on two ranks if and only if these things are.

    Args:
        decodes: its VAE counts, too. A rank may lack one if the call gives latents, and a text encoder if it is given embeddings.
    """
    parts = {name: getattr(pipe, name, None) for name in ("scheduler", "guider")}
    caching = caching_of(pipe)
    return {
        **{f"pipe.{name}": _configured(part) for name, part in parts.items() if part is not None},
        **({} if caching is None else {"its cache": {name: cache.as_text() for name, cache in caching.caches.items()}}),
        **_attention(pipe),
        **_dtypes(pipe, (*TRANSFORMERS, "unet", *(("vae",) if decodes else ()))),
        **loras.described(pipe),
        "version of para_core": version.version_and_sources(),
        "versions of packages": _versions(),
    }


def _attention(pipe: Any) -> dict[str, str]:
    """How that of each transformer is computed."""
    found = {name: plan_options(uncompiled(module)) for name, module in transformers_of(pipe).items()}
    return {
        f"{option} of {name}": value
        for name, options in found.items()
        if options is not None
        for option, value in options.by_name.items()
    }


def _configured(part: Any) -> dict[str, Any]:
    # What begins with an underscore is diffusers' own bookkeeping, and in no fixed order.
    settings = {name: value for name, value in getattr(part, "config", {}).items() if not name.startswith("_")}
    return {"class": type(part).__name__, **settings}


@cache
def _versions() -> str:
    # What follows a plus is how it was built, and differs between machines that compute alike.
    return ", ".join(f"{package.__name__} {package.__version__.partition('+')[0]}" for package in (torch, diffusers))


def _models(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, component in getattr(pipe, "components", {}).items():
        if isinstance(component, nn.Module):
            yield name, uncompiled(component)


def _dtypes(pipe: Any, names: Sequence[str]) -> dict[str, str]:
    """Of each model, the dtypes of its parameters."""
    found = {}
    for name, model in _models(pipe):
        if name not in names:
            continue
        dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters()})
        if dtypes:
            found[f"dtype of pipe.{name}"] = ", ".join(dtypes)
    return found


# -- LoRA


class Loras:
    """The LoRA layers (peft's) of one pipeline's models, described anew where they have changed only."""

    def __init__(self) -> None:
        # Of each model: how its layers were set, its weights with their versions, and the text.
        self._known: dict[str, tuple[list[str], list[tuple[ref[Tensor], int]], str]] = {}

    def described(self, pipe: Any) -> dict[str, str]:
        """By model, which adapters are active, how strongly, and a fingerprint of their weights.

        Left out are weights that are sharded, for they differ from rank to rank, that an offload keeps elsewhere, and that were fused
        into those of the model.
        """
        for name, model in _models(pipe):
            layers = _lora_layers(model)
            if not layers:
                self._known.pop(name, None)
            elif not self._is_known(name, layers):
                settings, weights = _settings_of(layers), _weights_of(layers)
                here = [weight for weight in weights if not isinstance(weight, DTensor) and not weight.is_meta]
                text = f"{'; '.join(sorted(set(settings)))}, weights {fingerprint(here):x}"
                self._known[name] = settings, [(ref(weight), version_of(weight)) for weight in weights], text
        return {f"LoRA of pipe.{name}": text for name, (_, _, text) in self._known.items()}

    def changed(self, pipe: Any) -> bool:
        """Whether :meth:`described` may give something else than when it was called last; takes no look at a weight's values."""
        found = {name: layers for name, model in _models(pipe) if (layers := _lora_layers(model))}
        return found.keys() != self._known.keys() or not all(self._is_known(*one) for one in found.items())

    def _is_known(self, name: str, layers: list[Any]) -> bool:
        if name not in self._known:
            return False
        settings, known, _ = self._known[name]
        weights = _weights_of(layers)
        if settings != _settings_of(layers) or len(weights) != len(known):
            return False
        return all(x is was() and is_version(x, version) for x, (was, version) in zip(weights, known, strict=True))


_NO_VERSION = -1


def version_of(x: Tensor) -> int:
    """A number that grows when ``x`` is written to, for :func:`is_version`."""
    return _NO_VERSION if x.is_inference() else x._version


def is_version(x: Tensor, version: int) -> bool:
    """Whether ``x`` was certainly not written to since it had this version; in ``torch.inference_mode`` nobody counts."""
    return version != _NO_VERSION and version_of(x) == version


def _settings_of(layers: list[Any]) -> list[str]:
    return [_lora_setting(layer) for layer in layers]


def _weights_of(layers: list[Any]) -> list[Tensor]:
    return [weight for layer in layers for weight in _weights(layer)]


def _lora_setting(layer: Any) -> str:
    active = [] if layer.disable_adapters else layer.active_adapters
    return f"active {active}, scales {dict(layer.scaling)}, fused {list(layer.merged_adapters)}"


def _lora_layers(model: nn.Module) -> list[Any]:
    # Its own list of adapters: without it there is none, and nothing needs to be walked.
    if not getattr(model, "peft_config", None):
        return []
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]


def _weights(layer: Any) -> Iterator[Tensor]:
    for name in layer.adapter_layer_names:
        yield from getattr(layer, name).parameters()


def fingerprint(tensors: list[Tensor]) -> int:
    """64 bits that differ where a bit of ``tensors`` does, but for a coincidence; the same on any device, in whatever order it sums."""
    sums = [_bit_sum(x.detach()) for x in tensors]
    if not sums:
        return 0
    total = 0
    # One transfer for all tensors of a device.
    for values in torch.stack([x.to(sums[0].device) for x in sums]).tolist():
        total = (total * 1_000_003 + values) % (1 << 64)
    return total


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
