"""Packing what goes to other ranks into one flat buffer, and unpacking what came: the contract, in plain PyTorch.

As it is, or, which is not exact, rounded to 8 bits: of each token and head ``[D]`` then D numbers of ``torch.int8`` or
``torch.float8_e4m3fn`` travel, and behind them the float32 that they are multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class CopyRegion(NamedTuple):
    """Some heads of some tokens of a tensor ``[B, H, S, D]``, and where they are in a flat buffer.

    There they lie as ``[tokens, B, heads, D]``, the rows ``[heads, D]`` of one token and sample behind those of the one before,
    in steps that leave room for other regions. Rounded, a head has D + 4 bytes in the place of D elements.

    Args:
        tensor: which of those given.
        token, tokens, head, heads: the first, and how many.
        offset: of the region in the buffer, in elements of it.
        step: from one row to the next, in elements of the buffer; at least heads · D, rounded heads · (D + 4).
    """

    tensor: int
    token: int
    tokens: int
    head: int
    heads: int
    offset: int
    step: int


def pack(tensors: Sequence[Tensor], regions: Sequence[CopyRegion], buffer: Tensor) -> Tensor:
    """Copy all regions from the tensors into ``buffer``, which is returned.

    Args:
        tensors: ``[B, H, S, D]``, of any strides and one dtype; B is the same for all, D need not be.
        regions: in the buffer no two overlap.
        buffer: flat, contiguous. What no region covers stays as it is.
    """
    for region in regions:
        _in_buffer(region, tensors, buffer).copy_(_in_tensor(region, tensors))
    return buffer


def unpack(buffer: Tensor, regions: Sequence[CopyRegion], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy all regions from ``buffer`` into the tensors, which are returned; args as for :func:`pack`, no two overlap in a tensor."""
    for region in regions:
        _in_tensor(region, tensors).copy_(_in_buffer(region, tensors, buffer))
    return tensors


def pack_rounded(tensors: Sequence[Tensor], regions: Sequence[CopyRegion], buffer: Tensor, to: torch.dtype) -> Tensor:
    """:func:`pack` into a buffer of bytes, rounded to the nearest number of ``to``: int8 (halves upwards) or float8_e4m3fn (to even).

    A scale is the largest amount of a token and head, divided by that of ``to``, or 1 if it is 0. What is not finite makes all of its
    token and head NaN.
    """
    for region in regions:
        _in_buffer(region, tensors, buffer, SCALE_BYTES).copy_(_rounded(_in_tensor(region, tensors), to))
    return buffer


def unpack_rounded(
    buffer: Tensor, regions: Sequence[CopyRegion], tensors: Sequence[Tensor], of: torch.dtype
) -> Sequence[Tensor]:
    """:func:`unpack` of what :func:`pack_rounded` packed, rounded to ``of``, into floats."""
    for region in regions:
        _in_tensor(region, tensors).copy_(_read(_in_buffer(region, tensors, buffer, SCALE_BYTES), of))
    return tensors


def _rounded(x: Tensor, to: torch.dtype) -> Tensor:
    """``[…, D]`` as it travels, ``[…, D + 4]``, uint8."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], x.shape[-1] + SCALE_BYTES, dtype=torch.uint8)
    largest = x.abs().amax(-1, keepdim=True).float().nan_to_num(torch.inf, torch.inf)
    scale = largest / LARGEST[to]
    scale = scale.masked_fill(scale == 0, 1.0)
    numbers = x.float() / scale
    if to == torch.int8:
        numbers = (numbers + 0.5).floor().nan_to_num(0.0)
    return torch.cat([numbers.to(to).view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def _read(eight: Tensor, of: torch.dtype) -> Tensor:
    """The numbers of :func:`_rounded`, float32."""
    numbers, scale = eight.split([eight.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    # A copy begins where a float32 may.
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    found: Tensor = numbers.contiguous().view(of).float() * scale
    return found


def _in_tensor(region: CopyRegion, tensors: Sequence[Tensor]) -> Tensor:
    """``[tokens, B, heads, D]``"""
    return (
        tensors[region.tensor]
        .narrow(2, region.token, region.tokens)
        .narrow(1, region.head, region.heads)
        .permute(2, 0, 1, 3)
    )


def _in_buffer(region: CopyRegion, tensors: Sequence[Tensor], buffer: Tensor, more: int = 0) -> Tensor:
    """``[tokens, B, heads, D + more]``"""
    batch, width = tensors[region.tensor].shape[0], tensors[region.tensor].shape[3] + more
    shape = region.tokens, batch, region.heads, width
    return buffer.as_strided(
        shape, (batch * region.step, region.step, width, 1), buffer.storage_offset() + region.offset
    )
