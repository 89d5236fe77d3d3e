"""Attention kernels of other libraries, as values for ``attn_func=``. The libraries are not installed with
para_core.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from torch import Tensor

from para_core.attention.attn_func import AttnFunc


def flash_attention_3(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return FlashAttention-3 (Hopper GPUs) as a value for ``attn_func=``. Exact in the dtype of its input.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``flash_attn_interface.flash_attn_func``.
        options: Keyword arguments of the kernel, such as ``pack_gqa=True``.

    Returns:
        A function that returns ``(out, lse)``. It accepts no mask.

    Raises:
        ImportError: The library is not installed.
    """
    kernel = function or _imported("flash_attn_interface", "flash_attn_func", "FlashAttention-3 (its folder hopper/)")

    def attn_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _refuse_mask("FlashAttention-3", attn_mask)
        # The library takes [B, S, H, D], which is the memory layout of most models' tensors: the transposes are views.
        result = kernel(
            *[x.transpose(1, 2) for x in (query, key, value)],
            softmax_scale=scale,
            causal=is_causal,
            **{**_asking_for_lse(kernel), **options},
        )
        if isinstance(result, Tensor):
            raise RuntimeError(
                "flash_attn_func returned out alone. Its lse is needed: pass function=a version that returns (out, "
                "lse)."
            )
        return result[0].transpose(1, 2), result[1]

    return attn_func


def _asking_for_lse(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument that makes ``function`` return lse. Earlier versions have none, and always return it."""
    asks = "return_attn_probs" in signature(function).parameters
    return {"return_attn_probs": True} if asks else {}


def sage_attention(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return SageAttention (arXiv:2410.02367) as a value for ``attn_func=``. **Not exact**: q·k is rounded to 8 bits,
    p·v to 16 or 8.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``sageattention.sageattn``.
        options: Keyword arguments of the kernel, such as ``smooth_k=True``.

    Returns:
        A function that returns ``(out, lse)``. It accepts no mask.

    Raises:
        ImportError: The library is not installed.
    """
    kernel = function or _imported("sageattention", "sageattn", "SageAttention")

    def attn_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _refuse_mask("SageAttention", attn_mask)
        result: tuple[Tensor, Tensor] = kernel(
            query, key, value, tensor_layout="HND", is_causal=is_causal, sm_scale=scale, return_lse=True, **options
        )
        return result

    return attn_func


def _refuse_mask(library: str, mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError(
            f"{library} takes no attn_mask, and this call has one of {list(mask.shape)}. Leave attn_func out for "
            "models with masks."
        )


def _imported(module: str, name: str, library: str) -> Callable[..., Any]:
    try:
        result: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module}.{name} of {library} cannot be imported. Install it as its authors say, or pass function=yours."
        ) from error
    return result
