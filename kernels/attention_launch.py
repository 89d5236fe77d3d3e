"""The launch of the attention kernel, and the operators that launch it.

The kernel itself is in :mod:`para_core.kernels.attention_kernel`. This module also validates the tensors of a
call (:func:`check_tensors`), splits head dims into the blocks that the kernel reads (:func:`split_head_dim`)
and finds the unit of its strides (:func:`stride_unit`).

:mod:`para_core.kernels.attention` and :mod:`para_core.kernels.attention_int8` register an operator each, and
launch the kernel in it; block sizes come from :mod:`para_core.kernels.attention_configs`. Tests:
tests/kernels/test_attention.py and tests/kernels/test_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from para_core.kernels.attention_configs import LARGEST_HEAD_DIM, Config, KernelCall
from para_core.kernels.attention_kernel import LOG2_E, attention_kernel
from para_core.kernels.attention_reference import in_float32

# A library of its own, because kernels import nothing of the rest of para_core.
LIBRARY = torch.library.Library("para_core", "FRAGMENT")
# All but ``out_dtype`` are the fields of KernelCall, in the same order.
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_ranges, Tensor? out_so_far, "
    "Tensor? lse_so_far, bool is_causal, SymInt shift, float scale, ScalarType out_dtype) -> (Tensor, Tensor)"
)
# The kernel computes offsets inside a tile of keys, at most 128, in int32. Tokens that are further apart are copied.
_FAR = 2**24
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class RoundedKeys(NamedTuple):
    """Keys in 8 bits, ``(key - mean) / scales`` rounded; see :mod:`para_core.kernels.attention_int8`."""

    key: Tensor  # [B, H_kv, S_k, D], int8
    scales: Tensor  # [B, H_kv, S_k], float32, contiguous
    mean: Tensor  # [B, H_kv, D], float32, contiguous


def check_tensors(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` if the kernel does not support the dtypes or shapes of these tensors.

    Nothing checks devices, nor ``key_ranges`` and ``so_far``, which callers make for these tensors: with
    other shapes the kernel would read other memory.
    """
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise TypeError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; expected one of float16, bfloat16 "
            "and float32 for all three."
        )
    if (
        not query.ndim == key.ndim == value.ndim == 4
        or key.shape[0] != query.shape[0]
        or query.shape[1] % max(1, key.shape[1])
        or (query.shape[1] > 0 and key.shape[1] == 0)
        or query.shape[-1] != key.shape[-1]
        or key.shape[:3] != value.shape[:3]
    ):
        raise ValueError(
            f"query, key and value are {list(query.shape)}, {list(key.shape)} and {list(value.shape)}; expected "
            "[B, H, S_q, D], [B, H_kv, S_k, D] and [B, H_kv, S_k, D_v] with H a multiple of H_kv."
        )
    batch, heads, num_queries, head_dim = query.shape
    if max(head_dim, value.shape[-1]) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims are {head_dim} and {value.shape[-1]}; expected at most {LARGEST_HEAD_DIM}. "
            "scaled_dot_product_attention has no limit."
        )
    if mask is None:
        return
    # The kernel would read bytes of uint8 as bools, which the reference adds to the scores.
    if mask.dtype not in (torch.bool, torch.int32) and not mask.is_floating_point():
        raise TypeError(
            f"mask is {mask.dtype}; expected bool, a floating-point dtype, or int32 as from pack_bits."
        )
    num_keys = key.shape[2]
    sizes = [(1, batch), (1, heads), (1, num_queries), (1, num_keys)]
    if mask.dtype == torch.int32:
        # Bits of keys in words, whose number is compared below.
        sizes = sizes[:3]
    if mask.ndim != 4 or any(size not in allowed for size, allowed in zip(mask.shape, sizes, strict=False)):
        raise ValueError(
            f"mask is {list(mask.shape)}; expected 4 dims, broadcastable to [B, H, S_q, S_k] = "
            f"{[batch, heads, num_queries, num_keys]}."
        )
    if mask.dtype == torch.int32 and mask.shape[3] != -(-num_keys // 32):
        raise ValueError(
            f"mask is {list(mask.shape)} in int32, bits of keys, for {num_keys} keys; expected "
            f"{-(-num_keys // 32)} words per row, as from pack_bits."
        )


def empty_outputs(query: Tensor, value: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate ``out`` ``[B, H, S_q, D_v]``, with ``[B, S_q, H, D_v]`` memory, and ``lse`` ``[B, H, S_q]``, float32."""
    batch, heads, num_queries, _ = query.shape
    out = query.new_empty(batch, num_queries, heads, value.shape[-1], dtype=out_dtype).transpose(1, 2)
    return out, query.new_empty(batch, heads, num_queries, dtype=torch.float32)


def launch_kernel(
    config: Config, call: KernelCall, *, out: Tensor, lse: Tensor, rounded: RoundedKeys | None = None
) -> None:
    """Launch the kernel with the block sizes of ``config``, and write the results to ``out`` and ``lse``.

    With ``rounded``, keys in 8 bits, the kernel reads these instead of the keys of ``call``, and also rounds
    queries. Without it attention is exact. Shapes are not checked here (:func:`check_tensors` does that), nor
    that ``lse`` and the rows of ``out`` are contiguous, as from :func:`empty_outputs`.
    """
    # ``out`` alone is empty if values have no dims, and then ``lse`` is still computed.
    if out.numel() == 0 and lse.numel() == 0:
        return
    query, key, value, mask, key_ranges, out_so_far, lse_so_far, is_causal, shift, scale = call.prepare()
    batch, heads, num_queries, head_dim = query.shape
    key_scales, key_mean, least_block = None, None, 16
    if rounded is not None:
        # A matrix product of 8-bit integers needs blocks of at least 32 head dims.
        key, key_scales, key_mean, least_block = rounded.key, rounded.scales, rounded.mean, 32
    query, key, value = _with_contiguous_rows(query), _with_contiguous_rows(key), _with_contiguous_rows(value)
    mask, kind_of_mask = _readable(mask)
    d, d_rest = split_head_dim(head_dim, least=least_block)
    v, v_rest = split_value_dim(value.shape[-1], config)
    # Without an earlier result the kernel reads none, so its strides may be any.
    strides = [_strides(x)[:3] for x in (query, key, value, out if out_so_far is None else out_so_far, out)]
    unit = stride_unit(strides)
    steps_q, steps_k, steps_v, steps_s, steps_o = ([step // unit for step in steps] for steps in strides)
    steps_mask, step_ranges, num_ranges = [0, 0, 0, 0], 0, 0
    if mask is not None:
        steps_mask = _strides(mask)
    if key_ranges is not None:
        step_ranges, num_ranges = _strides(key_ranges)[0], key_ranges.shape[1]
    grid = (triton.cdiv(num_queries, config.block_m) * heads * batch,)
    with torch.cuda.device_of(query):
        # Tensors, strides and numbers are passed by position, in the order of the signature in
        # attention_kernel.py: whoever changes one must change the other. Names would cost time in each
        # launch.
        attention_kernel[grid](
            query, key, value, mask, key_ranges, out_so_far, lse_so_far, key_scales, key_mean, out, lse,
            *steps_q, *steps_k, *steps_v, *steps_mask, step_ranges, *steps_s, *steps_o,
            num_queries, key.shape[2], num_ranges, shift, abs(scale) * LOG2_E.value,
            HEADS=heads, GROUP=heads // key.shape[1],
            D=d, D_REST=d_rest, D_END=head_dim, V=v, V_REST=v_rest, V_END=value.shape[-1],
            MASK=kind_of_mask, MASK_HAS_ROWS=mask is not None and mask.shape[2] > 1, CAUSAL=is_causal,
            HAS_RANGES=key_ranges is not None, MANY_RANGES=key_ranges is not None and num_ranges != 1,
            CONTINUES=out_so_far is not None, NEGATIVE=scale < 0, EIGHT_BITS=rounded is not None, UNIT=unit,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 and x.stride(2) < _FAR else x.contiguous()


def _readable(mask: Tensor | None) -> tuple[Tensor | None, str]:
    """Return ``mask`` in a dtype that the kernel reads, and the kernel's constant MASK for it: int32 words of
    bits, bytes for bool, floats up to 32 bits. A float64 mask is copied, the others are views.
    """
    if mask is None:
        return None, "none"
    if mask.dtype == torch.int32:
        return mask, "bits"
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), "bool"
    return in_float32(mask), "float"


def stride_unit(strides: Sequence[Sequence[int]]) -> int:
    """Return the number of elements in whose multiples the kernel gets its strides.

    Triton loads several elements at once only if it knows a divisor of the strides. It detects multiples of
    16 itself, but a stride of 72 must be passed as 9 units of 8, or Triton would load element by element.

    >>> stride_unit([[4096, 128]]), stride_unit([[72 * 24, 72]])
    (1, 8)
    """
    unit = gcd(16, *chain.from_iterable(strides))
    if unit == 16:
        return 1
    return unit


def _strides(x: Tensor) -> list[int]:
    """Return the strides of ``x``, with 0 for dims of size 1, whose stride has no meaning."""
    return [step * (size != 1) for size, step in zip(x.shape, x.stride(), strict=True)]


def split_head_dim(dim: int, *, least: int = 16) -> tuple[int, int]:
    """Split a head dim into one or two blocks, powers of 2 of at least ``least``, by default the smallest
    that ``tl.dot`` takes. The second is smaller, or 0 for none.

    >>> [split_head_dim(dim) for dim in (8, 64, 80, 96, 120, 192)]
    [(16, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64)]
    """
    first = least
    while 2 * first <= dim:
        first *= 2
    if dim <= first:
        return first, 0
    rest = least
    while first + rest < dim:
        rest *= 2
    if rest < first:
        return first, rest
    return 2 * first, 0


def split_value_dim(dim: int, config: Config) -> tuple[int, int]:
    """Split a head dim of values like :func:`split_head_dim`, and a single block also if
    :attr:`Config.split_values` demands it.
    """
    first, rest = split_head_dim(dim)
    # Two blocks stay as they are: the kernel reads no third one, and the first is then at most 128 wide, the
    # block_m of the GPUs that need two.
    if config.split_values and first > config.block_m and rest == 0:
        return first // 2, first // 2
    return first, rest


def register(name: str, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Define the operator ``torch.ops.para_core.<name>``. ``run`` computes it on CUDA and CPU tensors.

    Its arguments and outputs are those of ``_SCHEMA``: ``out`` and ``lse`` of one attention call.
    """
    # The tag makes the operator end a CUDA graph of torch.compile, like all operators of para_core (see
    # para_core.distributed.collectives.define_operator).
    LIBRARY.define(name + _SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))
    torch.library.register_fake(f"para_core::{name}", _fake, lib=LIBRARY)
    LIBRARY.impl(name, run, "CUDA")
    # On CPU tensors the kernel runs in Triton's interpreter.
    LIBRARY.impl(name, run, "CPU")


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out_dtype = rest[-1]  # as in _SCHEMA
    return empty_outputs(query, value, out_dtype)
