"""Detect diffusers' own caches on a model, which cannot be combined with First Block Cache of para_core."""

from __future__ import annotations

from typing import Any

from torch import nn

# The names of the diffusers modules that define the hooks of its caches.
_MODULES = (
    "faster_cache",
    "first_block_cache",
    "mag_cache",
    "pyramid_attention_broadcast",
    "sea_cache",
    "taylorseer_cache",
    "text_kv_cache",
)


def foreign_cache(module: nn.Module) -> str | None:
    """Return the config or hook class name of diffusers' cache on ``module``; None if no such cache is enabled."""
    config: Any = getattr(module, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for part in module.modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            # Look for hooks too, because apply_first_block_cache(transformer, ...) and similar functions set no
            # _cache_config.
            if type(hook).__module__.rsplit(".", maxsplit=1)[-1] in _MODULES:
                return type(hook).__name__
    return None


def require_no_foreign_cache(module: nn.Module) -> None:
    """Raise ``ValueError`` if one of diffusers' own caches is enabled on ``module``."""
    cache = foreign_cache(module)
    if cache is not None:
        raise ValueError(
            f"this {type(module).__name__} has a cache of diffusers ({cache}), and two caches would skip the same "
            "blocks. Call disable_cache() of the transformer first; apply_cache_on_pipe(pipe, ...) then is its only "
            "cache."
        )
