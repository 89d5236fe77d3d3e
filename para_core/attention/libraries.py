"""Attention kernels of FlashAttention-3 and -4 and SageAttention.

Each is available as a function for ``attn_func=`` and by name for ``backend=``. para_core does not install
the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from para_core.attention.local import AttnFunc


class Library(NamedTuple):
    """A library that computes attention: where its kernel is, and how to install it."""

    name: str
    module: str
    function: str
    install: str
    asks_for_lse: str  # The argument that makes the function return lse, in versions that have it.


_FLASH_3 = Library(
    "FlashAttention-3",
    "flash_attn_interface",
    "flash_attn_func",
    "build the folder hopper/ of Dao-AILab/flash-attention (python setup.py install); it is not on PyPI",
    "return_attn_probs",
)
_FLASH_4 = Library(
    "FlashAttention-4", "flash_attn.cute", "flash_attn_func", "pip install --pre flash-attn-4", "return_lse"
)
_SAGE = Library(
    "SageAttention",
    "sageattention",
    "sageattn",
    "build version 2.1.1 or later of thu-ml/SageAttention (pip install .); PyPI has an earlier one without lse",
    "return_lse",
)


def flash_attention_3(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs FlashAttention-3 (Hopper GPUs).

    The result is exact up to rounding in the dtype of the input.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``flash_attn_interface.flash_attn_func``.
        options: Keyword arguments of the kernel, such as ``pack_gqa=True``.

    Returns:
        A function that returns ``(out, lse)``. It accepts no mask.

    Raises:
        ImportError: The library is not installed.
    """
    return _flash_attention(_FLASH_3, function, options)


def flash_attention_4(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs FlashAttention-4 (Hopper and Blackwell GPUs).

    Arguments, result and errors are those of :func:`flash_attention_3`, but ``function`` defaults to
    ``flash_attn.cute.flash_attn_func``.
    """
    return _flash_attention(_FLASH_4, function, options)


def _flash_attention(
    library: Library, function: Callable[..., Any] | None, options: Mapping[str, Any]
) -> AttnFunc:
    kernel = function or import_kernel(library)

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
        _check_no_mask(library, attn_mask)
        # The library takes [B, S, H, D]. Most models' tensors have this memory layout, so transposing costs
        # no copy.
        result = kernel(
            *[x.transpose(1, 2) for x in (query, key, value)],
            softmax_scale=scale,
            causal=is_causal,
            **{**_ask_for_lse(kernel, library), **options},
        )
        if isinstance(result, Tensor):
            raise RuntimeError(
                f"{library.function} of {library.name} returned out alone. Its lse is needed: pass function=a version "
                "that returns (out, lse)."
            )
        return result[0].transpose(1, 2), result[1]

    return attn_func


def _ask_for_lse(function: Callable[..., Any], library: Library) -> dict[str, Any]:
    """Return the keyword argument that makes ``function`` return lse, as ``{name: True}``; empty if it has none."""
    if library.asks_for_lse in signature(function).parameters:
        return {library.asks_for_lse: True}
    return {}


def sage_attention(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs SageAttention (arXiv:2410.02367). **Not exact**.

    The kernel multiplies queries by keys in 8 bits, and probabilities by values in 16 or 8 bits.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``sageattention.sageattn``.
        options: Keyword arguments of the kernel, such as ``smooth_k=True``.

    Returns:
        A function that returns ``(out, lse)``. It accepts no mask.

    Raises:
        ImportError: The library is not installed.
    """
    kernel = function or import_kernel(_SAGE)

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
        _check_no_mask(_SAGE, attn_mask)
        result: tuple[Tensor, Tensor] = kernel(
            query,
            key,
            value,
            tensor_layout="HND",
            is_causal=is_causal,
            sm_scale=scale,
            return_lse=True,
            **options,
        )
        return result

    return attn_func


def _check_no_mask(library: Library, mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError(
            f"{library.name} takes no attn_mask, and this call has one of {list(mask.shape)}. Leave attn_func out for "
            "models with masks."
        )


def import_kernel(library: Library) -> Callable[..., Any]:
    """Import ``library`` and return its attention function.

    Raises:
        ImportError: The library is not installed, or this version of it returns no lse.
    """
    try:
        kernel: Callable[..., Any] = getattr(import_module(library.module), library.function)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{library.module}.{library.function} of {library.name} cannot be imported ({error}). To install it: "
            f"{library.install}. Or pass attn_func=, with a function of your own."
        ) from error
    if library is _SAGE and not _ask_for_lse(kernel, library):
        raise ImportError(
            f"{library.module}.{library.function} returns no lse, which a ring needs: this is an earlier "
            f"{library.name}. To install a later one: {library.install}."
        )
    return kernel


# This maps the name of each library for ``backend=`` to the library and the function that returns its
# ``attn_func``.
LIBRARIES: Mapping[str, tuple[Library, Callable[[], AttnFunc]]] = {
    "flash3": (_FLASH_3, flash_attention_3),
    "flash4": (_FLASH_4, flash_attention_4),
    "sage": (_SAGE, sage_attention),
}
DTYPES = (torch.float16, torch.bfloat16)
DEVICES = ("cuda",)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def require_library(backend: str | None) -> None:
    """Raise ``ImportError`` if ``backend`` names a library that is not installed.
    Any other backend passes.
    """
    if backend is not None and backend in LIBRARIES:
        import_kernel(LIBRARIES[backend][0])


def check_mask_and_lengths(
    backend: str, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool
) -> None:
    """Raise ``RuntimeError`` for a call with a mask, or a causal one with unequal numbers of queries and
    keys.

    Unlike SDPA, the backends for which this is called align the last query of a causal call with the last
    key.
    """
    if masked:
        raise RuntimeError(
            f"backend={backend!r} takes no attn_mask on a GPU, and this call has one. Name another backend, or none."
        )
    if is_causal and query.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"backend={backend!r} takes is_causal on a GPU for as many keys as queries; these are {query.shape[-2]} "
            f"queries and {value.shape[-2]} keys. Name another backend, or none."
        )


def check_tensors(backend: str, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool) -> None:
    """Raise ``RuntimeError`` if the library of ``backend`` does not support a call with these tensors.

    A call must be in float16 or bfloat16, on CUDA, and pass :func:`check_mask_and_lengths`.
    """
    library, _ = LIBRARIES[backend]
    check_mask_and_lengths(backend, query, value, masked=masked, is_causal=is_causal)
    if query.dtype not in DTYPES or query.device.type not in DEVICES:
        raise RuntimeError(
            f"backend={backend!r}: {library.name} takes float16 and bfloat16 on a CUDA device; this is {query.dtype} "
            f"on {query.device.type}. Name another backend, or none."
        )


def library_attention(
    backend: str, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run attention on one device with the library that ``backend`` names.
    Return ``out`` and a float32 ``lse``.
    """
    _, make = LIBRARIES[backend]
    out, lse = make()(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse.float()
