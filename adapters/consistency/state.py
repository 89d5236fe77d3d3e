"""Collect the state of a pipeline that must be equal on all ranks, in addition to the arguments of a call.

It consists of the scheduler, guider and cache, the dtypes of the models, their LoRAs, and the versions of the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from para_core import version
from para_core.adapters.attention_names import attention_by_name
from para_core.adapters.consistency.loras import Loras, models_of
from para_core.adapters.registry import transformers_of


def pipe_state(pipe: Any, loras: Loras, *, decodes: bool, cache: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of ``pipe`` by name, as values that :func:`require_same_call` can compare.

    Args:
        pipe: The pipeline.
        loras: Its LoRA descriptions, kept from call to call.
        decodes: Whether to include the VAE. A call that returns latents works without one. Text encoders are never
            included, because a call may pass embeddings instead of prompts.
        cache: Options of the cache by transformer; None without a cache.
    """
    configured: dict[str, dict[str, Any]] = {}
    for name in ("scheduler", "guider"):
        part = getattr(pipe, name, None)
        if part is not None:
            # Leave out names that begin with an underscore: diffusers keeps internal values there, some as lists in no
            # fixed order.
            settings = {key: value for key, value in getattr(part, "config", {}).items() if not key.startswith("_")}
            configured[f"pipe.{name}"] = {"class": type(part).__name__, **settings}
    names = (*transformers_of(pipe), "unet", *(("vae",) if decodes else ()))
    dtypes = {
        name: sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters()})
        for name, model in models_of(pipe)
        if name in names
    }
    return {
        **configured,
        **({} if cache is None else {"its cache": cache}),
        **{
            f"{option} of {name}": value
            for name, module in transformers_of(pipe).items()
            for option, value in attention_by_name(module).items()
        },
        **{f"dtype of pipe.{name}": ", ".join(values) for name, values in dtypes.items() if values},
        **loras.described(pipe),
        "version of para_core": version.version_and_sources(),
        "versions of packages": _versions(),
    }


@cache
def _versions() -> str:
    packages: list[Any] = [torch]
    # diffusers may be missing, because a user's own pipeline can run without it.
    with suppress(ImportError):
        import diffusers

        packages.append(diffusers)
    # Drop the part after a plus, such as +cu128: it names the build, which may differ between machines.
    return ", ".join(f"{package.__name__} {package.__version__.partition('+')[0]}" for package in packages)
