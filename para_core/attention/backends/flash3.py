"""FlashAttention-3 (arXiv:2407.08608) for ``attn_func=`` and ``backend=``. Tests: tests/attention/test_libraries.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from para_core.attention.backends.library import Library, flash_attn_func, library_backend

if TYPE_CHECKING:
    from para_core.attention.local import AttnFunc

LIBRARY = Library(
    "FlashAttention-3",
    "flash_attn_interface",
    "flash_attn_func",
    "build the folder hopper/ of Dao-AILab/flash-attention (python setup.py install); it is not on PyPI",
    "return_attn_probs",
)


def flash_attention_3(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs FlashAttention-3 (Hopper GPUs).

    The result is exact up to rounding in the dtype of the input.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``flash_attn_interface.flash_attn_func``.
        options: Keyword arguments of the kernel, such as ``pack_gqa=True``.

    Returns:
        A function that returns ``(out, lse)``. It accepts no mask, and ``is_causal`` only for as many keys as
        queries.

    Raises:
        ImportError: The library is not installed.
    """
    return flash_attn_func(LIBRARY, function, options)


BACKEND = library_backend(LIBRARY, flash_attention_3, aliases=("_flash_3", "_flash_varlen_3"))
