"""Attention by a Triton kernel of :mod:`para_core.kernels`: functions that its backends share.

:mod:`.triton_exact` and :mod:`.triton_int8` are the backends. Tests:
tests/attention/test_backend_selection.py and tests/attention/test_local.py; of the kernels themselves
tests/kernels/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.attention.backends.backend import LocalBackend
from para_core.attention.local_call import LocalAttentionCall
from para_core.kernels.attention_configs import LARGEST_HEAD_DIM
from para_core.triton_support import has_triton, is_interpreting

# A function with the signature of :func:`para_core.kernels.attention_reference.attention`, which also gives 0
# and -inf to a row that sees no key (``LocalBackend.clears_rows``).
KernelFunction = Callable[..., tuple[Tensor, Tensor]]


def triton_backend(
    import_attention: Callable[[], KernelFunction],
    dtypes: Mapping[str, torch.dtype],
    *,
    launches: Mapping[str, int],
) -> LocalBackend:
    """Return the backend of a Triton kernel.

    Args:
        import_attention: Imports and returns the kernel's function. It is called by each call of attention,
            because Triton is an optional dependency. Dynamo never traces it: in a graph the call runs inside
            an operator (:mod:`para_core.attention.operator`).
        dtypes: The dtypes that the kernel supports, by name.
        launches: See :class:`~para_core.attention.backends.backend.LocalBackend`.
    """

    def continue_from(
        so_far: tuple[Tensor, Tensor] | None, call: LocalAttentionCall, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        query, key, value, mask, is_causal, scale = call
        key_ranges = None
        if mask is not None:
            key_ranges = range_of_seen_keys(mask)
        attention = import_attention()
        return attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            key_ranges=key_ranges,
            scale=scale,
            so_far=so_far,
            out_dtype=out_dtype,
        )

    def attend(call: LocalAttentionCall) -> tuple[Tensor, Tensor]:
        return continue_from(None, call, call.query.dtype)

    check = partial(check_triton_call, dtypes)
    return LocalBackend(attend, check, continue_from=continue_from, clears_rows=True, launches=launches)


def check_triton_call(
    dtypes: Mapping[str, torch.dtype],
    backend: str,
    query: Tensor,
    value: Tensor,
    *,
    masked: bool,
    is_causal: bool,
) -> None:
    """Raise ``RuntimeError`` unless Triton is installed and a kernel for ``dtypes`` supports the tensors.

    With the first argument bound this is a :class:`~para_core.attention.backends.backend.CheckCall`, whose
    other arguments it does not need: the kernels take any mask. Of the devices only a CPU is refused. The
    launch refuses a GPU before compute capability 8.0 (:func:`~para_core.kernels.attention_configs.row_of`),
    on its rank alone, because Dynamo, which traces this function, cannot trace the cached question for the
    capability.
    """
    if not has_triton():
        raise RuntimeError(
            f'backend="{backend}" needs Triton, which is not installed here: pip install "triton>=3.5".'
        )
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype not in dtypes.values() or head_dim > LARGEST_HEAD_DIM:
        raise RuntimeError(
            f'backend="{backend}" takes {", ".join(dtypes)} with head dims up to {LARGEST_HEAD_DIM}; this is '
            f"{query.dtype} with {head_dim}. Name another backend, or none."
        )
    if query.device.type == "cpu" and not is_interpreting():
        raise RuntimeError(
            f'backend="{backend}" needs a CUDA device, and query is on the CPU. Name another backend, or none; '
            "Triton's own interpreter runs it there (TRITON_INTERPRET=1)."
        )


def range_of_seen_keys(mask: Tensor) -> Tensor | None:
    """Return ``(0, index of the last visible key + 1)`` for each sample, int32 ``[B or 1, 1, 2]``: with it
    the Triton kernel skips padding at the end.

    Return None unless the mask hides the same keys from all queries and heads of a sample, and has a column
    for each key: bool ``[B or 1, 1, 1, S_k]`` with S_k > 1. A single column may be broadcast over all keys.

    Args:
        mask: ``[B or 1, H or 1, S_q or 1, S_k or 1]``. It must have four dims, as the kernel requires.

    >>> range_of_seen_keys(torch.tensor([True, False, True, False]).view(1, 1, 1, 4)).tolist()
    [[[0, 3]]]
    """
    if mask.dtype != torch.bool or mask.shape[1] > 1 or mask.shape[2] > 1 or mask.shape[3] == 1:
        return None
    ends = torch.arange(1, mask.shape[3] + 1, device=mask.device, dtype=torch.int32)
    return F.pad((mask[:, 0] * ends).amax(-1, keepdim=True), (1, 0))
