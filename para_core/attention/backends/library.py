"""Attention of other libraries, which para_core does not install: functions that their backends share.

:mod:`.flash3`, :mod:`.flash4` and :mod:`.sage` are the backends that use them;
:mod:`para_core.attention.backend_selection` calls :func:`check_mask_and_lengths` for PyTorch's
FlashAttention, too. Tests: tests/attention/test_libraries.py, with stand-ins for the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from para_core.attention.backends.backend import LocalBackend
from para_core.attention.local_call import LocalAttentionCall

if TYPE_CHECKING:
    from para_core.attention.local import AttnFunc

# The dtypes and devices that the libraries' kernels support. Tests replace both.
LIBRARY_DTYPES = (torch.float16, torch.bfloat16)
LIBRARY_DEVICES = ("cuda",)


class Library(NamedTuple):
    """A library that computes attention: where its kernel is, and how to install it."""

    name: str
    module: str
    function: str
    install: str
    lse_argument: str  # The argument that makes the function return lse, in versions that have it.
    must_have_argument: bool = False  # Whether versions without this argument never return lse.


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
    if library.must_have_argument and not lse_arguments(kernel, library):
        raise ImportError(
            f"{library.module}.{library.function} returns no lse, which a ring needs: this is an earlier "
            f"{library.name}. To install a later one: {library.install}."
        )
    return kernel


def lse_arguments(kernel: Callable[..., Any], library: Library) -> dict[str, Any]:
    """Return the keyword argument that makes ``kernel`` return lse, as ``{name: True}``; empty if it has none."""
    if library.lse_argument in _parameter_names(kernel):
        return {library.lse_argument: True}
    return {}


@lru_cache(maxsize=16)
def _parameter_names(kernel: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters of ``kernel``. They are kept, because a backend asks in each call,
    and reading a signature takes the host longer than launching the kernel.
    """
    return frozenset(signature(kernel).parameters)


def flash_attn_func(
    library: Library, function: Callable[..., Any] | None, options: Mapping[str, Any]
) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs a kernel with the arguments of FlashAttention.

    Args:
        library: The library of the kernel.
        function: The kernel; None for that of the library.
        options: More keyword arguments of the kernel.

    Returns:
        A function that raises ``RuntimeError`` if the kernel returns no lse, and ``ValueError`` for a call that
        :func:`check_call` refuses.

    Raises:
        ImportError: The library is not installed.
    """
    kernel = function or import_kernel(library)
    more = {**lse_arguments(kernel, library), **options}

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
        check_call(library, query, key, attn_mask, is_causal=is_causal)
        # The library takes [B, S, H, D]. Most models' tensors have this memory layout, so transposing costs
        # no copy.
        result = kernel(
            *[x.transpose(1, 2) for x in (query, key, value)],
            softmax_scale=scale,
            causal=is_causal,
            **more,
        )
        if isinstance(result, Tensor):
            raise RuntimeError(
                f"{library.function} of {library.name} returned out alone. Its lse is needed: pass function=a version "
                "that returns (out, lse)."
            )
        return result[0].transpose(1, 2), result[1]

    return attn_func


def check_call(library: Library, query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
    """Raise ``ValueError`` for a call of a function for ``attn_func=`` with a mask, or a causal one with
    unequal numbers of queries and keys, which the libraries would compute unlike SDPA
    (:func:`check_mask_and_lengths`).
    """
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{library.name} takes is_causal for as many keys as queries; these are {query.shape[-2]} queries and "
            f"{key.shape[-2]} keys. Call scaled_dot_product_attention inside a mode, which splits such a call."
        )
    if mask is not None:
        raise ValueError(
            f"{library.name} takes no attn_mask, and this call has one of {list(mask.shape)}. Leave attn_func out for "
            "models with masks."
        )


def check_mask_and_lengths(
    backend: str, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool
) -> None:
    """Raise ``RuntimeError`` for a call with a mask, or a causal one with unequal numbers of queries and
    keys.

    Unlike SDPA, the backends for which this is called align the last query of a causal call with the last
    key, or compute no such call.
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


def check_library_call(
    library: Library, backend: str, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool
) -> None:
    """Raise ``RuntimeError`` if ``library`` does not support a call with these tensors.

    A call must be in float16 or bfloat16, on CUDA, and pass :func:`check_mask_and_lengths`.
    """
    check_mask_and_lengths(backend, query, value, masked=masked, is_causal=is_causal)
    if query.dtype not in LIBRARY_DTYPES or query.device.type not in LIBRARY_DEVICES:
        raise RuntimeError(
            f"backend={backend!r}: {library.name} takes float16 and bfloat16 on a CUDA device; this is {query.dtype} "
            f"on {query.device.type}. Name another backend, or none."
        )


def library_backend(
    library: Library, make_attn_func: Callable[[], AttnFunc], *, aliases: tuple[str, ...] = ()
) -> LocalBackend:
    """Return the backend that computes each call by ``make_attn_func()``, a function of ``library``. The
    library is imported at the first call.
    """

    def attend(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
        query, key, value, _, is_causal, scale = call
        out, lse = make_attn_func()(query, key, value, is_causal=is_causal, scale=scale)
        return out, lse.float()

    def check_installed() -> None:
        import_kernel(library)

    return LocalBackend(attend, partial(check_library_call, library), check_installed, aliases=aliases)
