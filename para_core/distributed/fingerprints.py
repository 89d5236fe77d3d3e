"""Fingerprints of tensors, by which ranks compare their inputs: 64 bits per tensor, computed on the tensor's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import tensor_bytes

_WORD_BYTES = 8
# Process at most this number of 64-bit words at a time (128 MiB, and as much again for intermediate results), unless a
# single tensor has more.
_MAX_WORDS = 1 << 24
# Constants of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): the step between
# positions, and the shifts and factors of its output function, which is Stafford's variant 13 of the finalizer of
# MurmurHash3.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """Return the fingerprint of each tensor: 16 hexadecimal digits that depend on its bytes in C order.

    The shape, dtype, strides and device of a tensor do not matter. Every 8 bytes are mixed with their position to 64
    random-looking bits, and these are summed. Two tensors of equal size with different bytes have the same fingerprint
    with probability 2^-64. Since bytes are compared, 0.0 and -0.0 differ, and NaNs with the same bits are equal. All
    devices return the same digits, because the mixing is integer arithmetic.

    The host waits once for each device, to read 8 bytes per tensor.
    """
    indices_on: dict[torch.device, list[int]] = {}
    for index, x in enumerate(tensors):
        indices_on.setdefault(x.device, []).append(index)
    # Start the computation on all devices before the host waits for the first one.
    sums = {device: _sums([tensors[index] for index in indices]) for device, indices in indices_on.items()}
    digits = [""] * len(tensors)
    for device, indices in indices_on.items():
        for index, value in zip(indices, sums[device].tolist(), strict=True):
            digits[index] = f"{value % 2**64:016x}"
    return digits


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fingerprints of tensors on one device as int64, ``[len(tensors)]``."""
    sizes = [-(-x.nbytes // _WORD_BYTES) for x in tensors]
    if sum(sizes) > _MAX_WORDS and len(tensors) > 1:
        half = len(tensors) // 2
        return torch.cat([_sums(tensors[:half]), _sums(tensors[half:])])
    rows = [tensor_bytes(x.detach()) for x in tensors]
    words = torch.zeros(sum(sizes), dtype=torch.int64, device=tensors[0].device)
    steps = torch.arange(1, max(sizes) + 1, device=words.device) * _signed(_STEP)
    parts = words.split(sizes)
    for part, row in zip(parts, rows, strict=True):
        # Copy the bytes, because view(torch.int64) requires an aligned offset and a multiple of 8 bytes.
        part.view(torch.uint8)[: row.numel()].copy_(row)
        part.add_(steps[: part.numel()])
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, _LAST_SHIFT))
    return torch.stack([part.sum() for part in parts])


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Return int64 ``words`` shifted to the right as unsigned integers. torch's own shift would copy the sign bit."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits as the unsigned ``value``."""
    return value - 2**64 if value >= 2**63 else value
