"""Choose the backend of local attention: the one that the caller names, or the fastest one measured, or PyTorch's own
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from para_core.torch_internals import cudnn_sdp_enabled, efficient_sdp_enabled, flash_sdp_enabled, math_sdp_enabled

Backend = Literal["flash", "efficient", "cudnn", "math", "triton", "triton-int8"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
# Backends that are not exact, with the exact backend that computes a call that keeps a gradient. They are never chosen
# unless the user names them.
EXACT_FORM: Mapping[Backend, Backend] = {"triton-int8": "triton"}

# The fastest backend by (compute capability, head dim, causal), for 16 bits without a mask, if PyTorch would choose
# another one. Rows come from benchmarks/attention/single_device.py on that device, and from nowhere else. It has not
# run on one yet, so there is none: PyTorch's own order holds everywhere, and the Triton kernel computes only where it
# is named.
FASTEST: Mapping[tuple[int, int, bool], Backend] = {}

OF_PYTORCH: Mapping[Backend, int] = {
    "flash": SDPBackend.FLASH_ATTENTION.value,
    "efficient": SDPBackend.EFFICIENT_ATTENTION.value,
    "cudnn": SDPBackend.CUDNN_ATTENTION.value,
    "math": SDPBackend.MATH.value,
}
_OF_CUDA = ("efficient", "cudnn")  # PyTorch has no form of them for CPUs
# The switches of sdpa_kernel(...) and torch.backends.cuda.enable_*_sdp(...). Dynamo treats these functions as
# constants, but not the public functions that call them.
SWITCHES: Mapping[Backend, Callable[[], bool]] = {
    "flash": flash_sdp_enabled,
    "efficient": efficient_sdp_enabled,
    "cudnn": cudnn_sdp_enabled,
    "math": math_sdp_enabled,
}


def resolve_backend(
    backend: Backend | None, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool = False
) -> Backend | None:
    """Return the backend for a call, or None if PyTorch chooses it.

    Args:
        backend: The backend that the caller named. Without it, the table of measured backends is used, unless the user
            has switched off a backend of PyTorch, and so chosen among the others.
        masked: Whether the call has a mask.

    Raises:
        RuntimeError: The named backend is switched off or does not support the call. This depends on dtype, head dims,
            device and ``masked``, and on the lengths if the call is computed in one piece.
    """
    if backend is None:
        return _fastest(query, masked=masked, is_causal=is_causal) if FASTEST else None
    if backend in ("triton", "triton-int8"):
        _require_triton(backend, query, value)
    elif not SWITCHES[backend]():
        raise RuntimeError(
            f"backend={backend!r} is switched off by sdpa_kernel(...) or torch.backends.cuda.enable_*_sdp(...). Switch "
            "it on, or name another one."
        )
    elif query.is_cpu and backend in _OF_CUDA:
        raise RuntimeError(
            f'backend="{backend}" needs a CUDA device, and query is on the CPU. Name another backend, or none.'
        )
    elif backend == "flash" and not query.is_cpu:
        _require_flash_of_cuda(query, value, masked=masked, is_causal=is_causal)
    return backend


def _require_flash_of_cuda(query: Tensor, value: Tensor, *, masked: bool, is_causal: bool) -> None:
    """Raise ``RuntimeError`` for calls that CUDA's FlashAttention would compute wrongly, without an error of its own.

    It has no argument for a mask, and aligns a causal diagonal with the last key (transformers/cuda/sdp_utils.cpp,
    check_flash_causal_non_square_seqlens).
    """
    if masked:
        raise RuntimeError(
            'backend="flash" takes no attn_mask on a GPU, and this call has one. Name another backend, or none.'
        )
    if is_causal and query.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f'backend="flash" takes is_causal on a GPU for as many keys as queries; these are {query.shape[-2]} '
            f"queries and {value.shape[-2]} keys. Name another backend, or none."
        )


def _fastest(query: Tensor, *, masked: bool, is_causal: bool) -> Backend | None:
    arch = _arch(query.device)
    if arch is None or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    fastest = FASTEST.get((arch, query.shape[-1], is_causal))
    if fastest is None or (masked and fastest != "triton") or not all(is_on() for is_on in SWITCHES.values()):
        return None
    return None if fastest == "triton" and not has_triton() else fastest


def _arch(device: torch.device) -> int | None:
    return _capability(device.index) if device.type == "cuda" else None


@lru_cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


# Looked up at import, because Dynamo cannot trace find_spec.
_HAS_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    return _HAS_TRITON


def _require_triton(backend: Backend, query: Tensor, value: Tensor) -> None:
    if not has_triton():
        raise RuntimeError(f'backend="{backend}" needs Triton, which is not installed here: pip install "triton>=3.5".')
    head_dim = max(query.shape[-1], value.shape[-1])
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    if backend == "triton":
        dtypes["float32"] = torch.float32
    if query.dtype not in dtypes.values() or head_dim > 256:
        raise RuntimeError(
            f'backend="{backend}" takes {", ".join(dtypes)} with head dims up to 256; this is {query.dtype} with '
            f"{head_dim}. Name another backend, or none."
        )
    if query.device.type == "cpu" and not _is_interpreting():
        raise RuntimeError(
            f'backend="{backend}" needs a CUDA device, and query is on the CPU. Name another backend, or none; '
            "Triton's own interpreter runs it there (TRITON_INTERPRET=1)."
        )


def _is_interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
