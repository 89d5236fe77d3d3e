"""Fingerprints of tensors, by which ranks compare inputs: 64 bits per tensor, computed on the tensor's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.collectives import tensor_bytes

_WORD_BYTES = 8
# Words that are mixed at a time, unless one tensor has more: 128 MiB, and as much again for intermediate results.
_MAX_WORDS = 1 << 24
# Constants of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): the step between
# positions, and the shifts and factors of its output function, which is Stafford's variant 13 of the finalizer of
# MurmurHash3.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """Return for each tensor 16 hexadecimal digits that depend on its bytes in C order, wherever and however it is
    stored.

    Each 8 bytes and their position are mixed to 64 random-looking bits, which are added up. Tensors of one size whose
    bytes differ have the same fingerprint with probability 2^-64; so 0.0 and -0.0 differ, and equal NaNs are equal. The
    mixing is integer arithmetic: all devices give the same digits. Shape and dtype do not enter.

    The host waits once per device, for 8 bytes per tensor.
    """
    indices_on: dict[torch.device, list[int]] = {}
    for index, x in enumerate(tensors):
        indices_on.setdefault(x.device, []).append(index)
    # All devices compute before the host waits for the first.
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
        # A copy, because view(torch.int64) demands an aligned offset and a multiple of 8 bytes.
        part.view(torch.uint8)[: row.numel()].copy_(row)
        part.add_(steps[: part.numel()])
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, _LAST_SHIFT))
    return torch.stack([part.sum() for part in parts])


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Return the words as unsigned integers shifted to the right. torch's own shift of int64 keeps the sign."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
