"""Reference, in plain PyTorch: pack the tensors for other ranks into one flat buffer, and unpack them.

Tensors are sent unchanged, or rounded to 8 bits, which is not exact. With rounding, each token and head
``[D]`` becomes D numbers of ``torch.int8`` or ``torch.float8_e4m3fn``, followed by a float32 scale.

:mod:`para_core.attention.pack_ops` calls it on a CPU and without Triton; the kernel is in
``kernels/pack.py``. Tests: tests/kernels/test_pack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Size of a scale, which is a float32.
SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class CopyRegion(NamedTuple):
    """Some heads of some tokens of a tensor ``[B, H, S, D]``, and their position in a flat buffer.

    The buffer holds the region as ``[tokens, B, heads, D]``: one row ``[heads, D]`` per token and sample. The
    first row is at ``offset``, and rows begin ``step`` elements apart, which may leave space for other
    regions. ``offset`` and ``step`` count elements of the buffer. If rounded to 8 bits, these are bytes, and
    a head takes D + 4 of them. ``tensor`` is the index of the tensor, ``token`` and ``head`` are the first
    ones. The kernel reads the seven fields by their positions.
    """

    tensor: int
    token: int
    tokens: int
    head: int
    heads: int
    offset: int
    step: int


def pack(
    tensors: Sequence[Tensor], regions: Sequence[CopyRegion], buffer: Tensor, to: torch.dtype | None = None
) -> Tensor:
    """Copy all regions from the tensors into ``buffer``, and return it.

    Args:
        tensors: ``[B, H, S, D]``, of any strides and one dtype. B is equal for all, D may differ.
        regions: Regions that do not overlap in the buffer.
        buffer: Flat and contiguous; uint8 if tensors are rounded. Elements outside all regions are not
            changed.
        to: Dtype to round to: int8 (halves upwards) or float8_e4m3fn (halves to even); None to copy. The
            scale of a token and head is its largest absolute value divided by the largest number of ``to``,
            or 1 if it is 0 or D is 0. If an element is not finite, all of its token and head become NaN.
    """
    for region in regions:
        rows = _in_tensor(region, tensors)
        if to is not None:
            rows = _encode(rows, to)
        _in_buffer(region, tensors, buffer, to).copy_(rows)
    return buffer


def unpack(
    buffer: Tensor, regions: Sequence[CopyRegion], tensors: Sequence[Tensor], of: torch.dtype | None = None
) -> Sequence[Tensor]:
    """Copy all regions from ``buffer`` into the tensors, and return the tensors.

    Args:
        buffer: A buffer that :func:`pack` filled.
        regions: Regions that do not overlap in the tensors.
        tensors: ``[B, H, S, D]``. Elements outside all regions are not changed.
        of: The dtype to which :func:`pack` rounded; None if it did not. With rounding the tensors may have
            any floating-point dtype.
    """
    for region in regions:
        rows = _in_buffer(region, tensors, buffer, of)
        if of is not None:
            rows = _decode(rows, of)
        _in_tensor(region, tensors).copy_(rows)
    return tensors


def _encode(x: Tensor, to: torch.dtype) -> Tensor:
    """Round ``x`` ``[…, D]`` to ``to``.
    Return the numbers and scale of each row as bytes: ``[…, D + 4]``, uint8.
    """
    if x.numel():
        largest = x.abs().amax(-1, keepdim=True).float().nan_to_num(torch.inf, torch.inf)
        scale = largest / LARGEST[to]
        scale = scale.masked_fill(scale == 0, 1.0)
    else:
        # Torch refuses the largest of no elements.
        scale = x.new_ones(*x.shape[:-1], 1, dtype=torch.float32)
    numbers = x.float() / scale
    if to == torch.int8:
        numbers = (numbers + 0.5).floor().nan_to_num(0.0)
    return torch.cat([numbers.to(to).view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def _decode(eight: Tensor, of: torch.dtype) -> Tensor:
    """Return the float32 numbers that :func:`_encode` encoded in ``eight``."""
    numbers, scale = eight.split([eight.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    # Clone, because a float32 view needs memory that is aligned to 4 bytes.
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    decoded: Tensor = numbers.contiguous().view(of).float() * scale
    return decoded


def _in_tensor(region: CopyRegion, tensors: Sequence[Tensor]) -> Tensor:
    """Return the region as a view of its tensor, ``[tokens, B, heads, D]``."""
    rows = tensors[region.tensor].narrow(2, region.token, region.tokens).narrow(1, region.head, region.heads)
    return rows.permute(2, 0, 1, 3)


def _in_buffer(
    region: CopyRegion, tensors: Sequence[Tensor], buffer: Tensor, rounded_to: torch.dtype | None
) -> Tensor:
    """Return the region as a view of the buffer, ``[tokens, B, heads, D]``, or D + 4 if rounded."""
    batch, _, _, width = tensors[region.tensor].shape
    if rounded_to is not None:
        width += SCALE_BYTES
    size = region.tokens, batch, region.heads, width
    return buffer.as_strided(
        size, (batch * region.step, region.step, width, 1), buffer.storage_offset() + region.offset
    )
