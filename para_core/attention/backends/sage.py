"""SageAttention, as a function for ``attn_func=`` and by name for ``backend=``. **Not exact**.

:mod:`.library` has what the libraries share. Tests: tests/attention/test_libraries.py, with a stand-in for
the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from para_core.attention.backends.library import Library, check_call, import_kernel, library_backend

if TYPE_CHECKING:
    from para_core.attention.local import AttnFunc

LIBRARY = Library(
    "SageAttention",
    "sageattention",
    "sageattn",
    "build version 2.1.1 or later of thu-ml/SageAttention (pip install .); PyPI has an earlier one without lse",
    "return_lse",
    must_have_argument=True,
)


def sage_attention(function: Callable[..., Any] | None = None, **options: Any) -> AttnFunc:
    """Return a function for ``attn_func=`` that runs SageAttention (arXiv:2410.02367). **Not exact**.

    The kernel multiplies queries by keys in 8 bits, and probabilities by values in 16 or 8 bits.

    Args:
        function (`Callable`, *optional*): The kernel. Defaults to ``sageattention.sageattn``.
        options: Keyword arguments of the kernel, such as ``smooth_k=True``.

    Returns:
        A function that returns ``(out, lse)``, with lse ``[B, H, S_q]`` as the natural logarithm of the sum
        of the exponentials of the scores, by which a ring merges; the library undoes what ``smooth_k``
        subtracts. It accepts no mask, ``is_causal`` only for as many keys as queries, and ignores
        ``dropout_p``: a call over ranks with dropout is refused before.

    Raises:
        ImportError: The library is not installed.
    """
    kernel = function or import_kernel(LIBRARY)

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
        check_call(LIBRARY, query, key, attn_mask, is_causal=is_causal)
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


BACKEND = library_backend(
    LIBRARY,
    sage_attention,
    aliases=(
        "sage",
        "sage_varlen",
        # diffusers' names of single kernels. sageattn chooses among them by the GPU, whichever is named here.
        "_sage_qk_int8_pv_fp8_cuda",
        "_sage_qk_int8_pv_fp8_cuda_sm90",
        "_sage_qk_int8_pv_fp16_cuda",
        "_sage_qk_int8_pv_fp16_triton",
    ),
)
