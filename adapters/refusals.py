"""Which attention of a diffusers transformer goes through ``scaled_dot_product_attention``, where a mode can see it."""

from __future__ import annotations

from typing import Any

from torch import nn

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


def _name_of(backend: Any) -> str:
    if backend is None:
        # Set for all models: by the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
