"""What decides, beside its arguments, what a pipeline generates: it must be alike on all ranks of a mesh.

Its scheduler, guider and cache, the dtypes of its models, their LoRAs, and the versions of the packages that run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from para_core import version
from para_core.adapters.consistency.loras import Loras, models_of
from para_core.adapters.registry import TRANSFORMERS, transformers_of
from para_core.instance_patching import uncompiled
from para_core.plans.region import plan_options


def pipe_state(pipe: Any, loras: Loras, *, decodes: bool, cache: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """By name, values that are equal on two ranks if and only if these things are.

    Args:
        cache: Options of its cache, by transformer.
        decodes: its VAE counts, too. A rank may lack one if the call gives latents, and a text encoder if it is given embeddings.
    """
    parts = {name: getattr(pipe, name, None) for name in ("scheduler", "guider")}
    return {
        **{f"pipe.{name}": _configured(part) for name, part in parts.items() if part is not None},
        **({} if cache is None else {"its cache": cache}),
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
    packages: list[Any] = [torch]
    # A pipeline or transformer of one's own runs without diffusers.
    with suppress(ImportError):
        import diffusers

        packages.append(diffusers)
    # What follows a plus is how it was built, and differs between machines that compute alike.
    return ", ".join(f"{package.__name__} {package.__version__.partition('+')[0]}" for package in packages)


def _dtypes(pipe: Any, names: Sequence[str]) -> dict[str, str]:
    """Of each model, the dtypes of its parameters."""
    found = {}
    for name, model in models_of(pipe):
        if name not in names:
            continue
        dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters()})
        if dtypes:
            found[f"dtype of pipe.{name}"] = ", ".join(dtypes)
    return found
