"""Packing what goes to other ranks into one flat buffer, and unpacking what came: the contract, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """Some heads of some tokens of a tensor ``[B, H, S, D]``, and where they are in a flat buffer.

    There they lie as ``[tokens, B, heads, D]``, the rows ``[heads, D]`` of one token and sample behind those of the one before,
    in steps that leave room for other boxes.

    Args:
        tensor: which of those given.
        token, tokens, head, heads: the first, and how many.
        offset: of the box in the buffer, in elements.
        step: from one row to the next, in elements; at least heads · D.
    """

    tensor: int
    token: int
    tokens: int
    head: int
    heads: int
    offset: int
    step: int


def pack(tensors: Sequence[Tensor], boxes: Sequence[Box], buffer: Tensor) -> Tensor:
    """Copy all boxes from the tensors into ``buffer``, which is returned.

    Args:
        tensors: ``[B, H, S, D]``, of any strides and one dtype; B is the same for all, D need not be.
        boxes: in the buffer no two overlap.
        buffer: flat, contiguous. What no box covers stays as it is.
    """
    for box in boxes:
        _in_buffer(box, tensors, buffer).copy_(_in_tensor(box, tensors))
    return buffer


def unpack(buffer: Tensor, boxes: Sequence[Box], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy all boxes from ``buffer`` into the tensors, which are returned; args as for :func:`pack`, no two overlap in a tensor."""
    for box in boxes:
        _in_tensor(box, tensors).copy_(_in_buffer(box, tensors, buffer))
    return tensors


def _in_tensor(box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """``[tokens, B, heads, D]``"""
    return tensors[box.tensor].narrow(2, box.token, box.tokens).narrow(1, box.head, box.heads).permute(2, 0, 1, 3)


def _in_buffer(box: Box, tensors: Sequence[Tensor], buffer: Tensor) -> Tensor:
    batch, width = tensors[box.tensor].shape[0], tensors[box.tensor].shape[3]
    shape = box.tokens, batch, box.heads, width
    return buffer.as_strided(shape, (batch * box.step, box.step, width, 1), buffer.storage_offset() + box.offset)
