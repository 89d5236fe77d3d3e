"""What of a diffusers transformer keeps it from running on several ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from para_core.cache.foreign import foreign_cache

# These are scaled_dot_product_attention under a switch that says how it computes.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def unseen_attention(transformer: nn.Module, ranks: int, name: str) -> str | None:
    """Why ``transformer`` cannot run on ``ranks`` sequence ranks with the backends that it attends with; None if it can.

    One module alone may have another backend (``block.attn.set_attention_backend``), so it does not do to see that some
    attention was intercepted.

    Args:
        name: what the user calls it, for the message.
    """
    if ranks == 1:
        return None
    for place, module in transformer.named_modules():
        processor: Any = getattr(module, "processor", None)
        # A processor without this attribute calls scaled_dot_product_attention itself, whatever was set.
        if hasattr(processor, "_attention_backend"):
            backend = _name_of(processor._attention_backend)
            if backend not in _SEEN:
                return (
                    f"{name} attends with diffusers' backend {backend!r} in {place!r}, which does not go through "
                    f"scaled_dot_product_attention: on {ranks} ranks each would attend to its own tokens only. Switch to a "
                    f"native one: {name}.set_attention_backend('native')."
                )
    return None


def rank_local_cache(transformer: nn.Module, ranks: int, name: str) -> str | None:
    """Why a cache of diffusers keeps ``transformer`` from running on ``ranks``; None if it does not.

    Args:
        name: what the user calls it, for the message.
    """
    found = None if ranks == 1 else foreign_cache(transformer)
    if found is None:
        return None
    return (
        f"{name} has a cache of diffusers ({found}), which decides on each rank alone: ranks would skip different steps, and wait "
        f"for each other. Call {name}.disable_cache(), and apply_cache_on_pipe(pipe, ...), with which they decide together."
    )


def _name_of(backend: Any) -> str:
    if backend is None:
        # Set for all models: by the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
