"""Reference of the attention kernel, in plain PyTorch.
A call covers some keys, and can continue an earlier call.

Tests compare the kernel with it, and no call falls back to it. The library passes at most one range of keys
per sample, no offsets and no mask of bits; the kernel takes these from other callers. Tests:
tests/kernels/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.kernels.merge_reference import merge


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
    key_ranges: Tensor | None = None,
    scale: float | None = None,
    so_far: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over ``key``. With ``so_far``, merge the result with earlier attention over other
    keys.

    A key is visible to a query if ``mask``, ``is_causal`` and ``key_ranges`` all permit it. Sums are in
    float32 or float64.

    Args:
        query: ``[B, H, S_q, D]``, of any strides; ``[B, S_q, H, D]`` memory is as fast.
        key, value: ``[B, H_kv, S_k, D]``, ``[B, H_kv, S_k, D_v]``. H_kv divides H: query head i uses key head
            ``i // (H // H_kv)``.
        mask: Bool (True if a query sees a key) or float (added to the scores), 4-D, broadcastable to
            ``[B, H, S_q, S_k]``; or int32, a bool mask packed by :func:`pack_bits`, with 32 keys per word.
        is_causal: Query i sees key j if ``j + key_offset <= i + query_offset``.
        query_offset, key_offset: Position of the first query and of the first key in the whole sequence.
        key_ranges: ``[B or 1, R, 2]``, int32: each sample has R ranges ``(start, end)``, ascending and
            disjoint, within S_k, and sees the keys ``start <= j < end`` of each. See
            :func:`ranges_of_lengths`.
        scale: Scale of the scores; ``1 / sqrt(D)`` if None.
        so_far: ``out`` ``[B, H, S_q, D_v]``, of any float dtype, and ``lse`` ``[B, H, S_q]``, float32, over
            other keys. The library's ``out`` is float32, but in the dtype of ``query`` after a block without
            keys.
        out_dtype: Dtype of ``out``; that of ``query`` if None. Use float32 if another call continues from the
            result.

    Returns:
        ``out`` ``[B, H, S_q, D_v]``, with ``[B, S_q, H, D_v]`` memory, and ``lse`` ``[B, H, S_q]``, natural
        log, float32 (float64 for float64 input). A row that sees no key gives 0 and -inf. A row whose scores
        are all as low as ``finfo.min`` gives the mean of the values, like ``scaled_dot_product_attention``,
        and a finite lse.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // max(1, key.shape[1])
    key, value = (x.to(dtype).repeat_interleave(group, dim=1) for x in (key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query.to(dtype) * scale @ key.transpose(-1, -2)
    if mask is not None and mask.dtype == torch.int32:
        mask = unpack_bits(mask, key.shape[2])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -inf)
    elif mask is not None:
        scores = scores + (mask if dtype == torch.float64 else in_float32(mask))
    if is_causal:
        queries = torch.arange(query.shape[2], device=query.device) + query_offset
        keys = torch.arange(key.shape[2], device=key.device) + key_offset
        scores = scores.masked_fill(keys > queries[:, None], -inf)
    if key_ranges is not None:
        keys = torch.arange(key.shape[2], device=key.device)[:, None]
        visible = ((key_ranges[:, None, :, 0] <= keys) & (keys < key_ranges[:, None, :, 1])).any(-1)
        scores = scores.masked_fill(~visible[:, None, None], -inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.softmax(scores, dim=-1).masked_fill((lse == -inf)[..., None], 0.0) @ value
    if so_far is not None:
        earlier_out, earlier_lse = so_far
        out, lse = merge(earlier_out.to(lse.dtype), earlier_lse, out, lse)
    batch, heads, num_queries, _ = query.shape
    memory = query.new_empty(batch, num_queries, heads, value.shape[-1], dtype=out_dtype or query.dtype)
    return memory.transpose(1, 2).copy_(out), lse


def pack_bits(mask: Tensor) -> Tensor:
    """Pack bools ``[..., S_k]`` into int32 ``[..., ceil(S_k / 32)]``; key j is bit ``j % 32`` of word ``j //
    32``.

    >>> pack_bits(torch.arange(34) % 32 < 2).tolist()
    [3, 3]
    """
    bits = F.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32)).to(torch.int32)
    # Each bit is in one term only, so the sum equals the bitwise or. Bit 31 is the sign of the int32.
    words: Tensor = (bits << torch.arange(32, device=mask.device, dtype=torch.int32)).sum(
        -1, dtype=torch.int32
    )
    return words


def unpack_bits(words: Tensor, num_keys: int) -> Tensor:
    """Return the bool mask ``[..., num_keys]`` that :func:`pack_bits` packed into ``words``."""
    bits = words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
    mask: Tensor = bits.flatten(-2)[..., :num_keys].bool()
    return mask


def in_float32(mask: Tensor) -> Tensor:
    """Return a float64 mask in float32, other masks unchanged.
    Finite numbers below float32's range remain finite.
    """
    if mask.dtype != torch.float64:
        return mask
    return mask.clamp(min=torch.finfo(torch.float32).min).float().masked_fill_(mask == -inf, -inf)


def ranges_of_lengths(lengths: Tensor, segments: Sequence[int]) -> Tensor:
    """Return the ``key_ranges`` of :func:`attention` for keys that are padded at the end of each segment.

    Args:
        lengths: ``[B]``, or ``[B, R]`` with a column per segment: number of keys that are not padding.
        segments: Number of keys of each of the R segments, padding included.

    Returns:
        ``[B, R, 2]``, int32, on the device of ``lengths``.

    Raises:
        ValueError: If ``lengths`` has another number of columns than there are segments.

    >>> ranges_of_lengths(torch.tensor([3, 5]), [5]).tolist()
    [[[0, 3]], [[0, 5]]]
    >>> ranges_of_lengths(torch.tensor([[2, 4]]), [5, 4]).tolist()  # 5 text tokens with 2 valid ones, then the image
    [[[0, 2], [5, 9]]]
    """
    if lengths.ndim == 1:
        lengths = lengths[:, None]
    if lengths.shape[-1] != len(segments):
        raise ValueError(
            f"lengths is {list(lengths.shape)} for {len(segments)} segments; expected [B, {len(segments)}]."
        )
    starts = torch.tensor([0, *segments[:-1]]).cumsum(0).to(lengths)
    return torch.stack([starts.expand_as(lengths), starts + lengths], dim=-1).to(torch.int32)
