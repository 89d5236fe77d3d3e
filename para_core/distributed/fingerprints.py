"""Fingerprints of tensors, by which ranks compare their inputs, and the bytes of a tensor.

``adapters/agree/arguments.py`` and ``adapters/agree/loras.py`` compare fingerprints; those who send or hash a
tensor, such as ``cfg/guidance.py``, call :func:`tensor_bytes`. Nothing here communicates. Tests:
tests/distributed/test_fingerprints.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
# Process at most this number of 64-bit words at a time (128 MiB, and as much again for intermediate results),
# unless a single tensor has more.
_MAX_WORDS = 1 << 24
# A fingerprint of many tensors is computed in chunks of this number of 64-bit words: few enough to stay in
# the cache of a CPU, many enough that a GPU computes longer than it takes to launch the kernels (32 MiB).
_CHUNK_WORDS_CPU, _CHUNK_WORDS_GPU = 1 << 16, 1 << 22
# Constants of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): the step
# between positions, and the shifts and factors of its output function, which is Stafford's variant 13 of the
# finalizer of MurmurHash3.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def tensor_bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` as a 1-D uint8 tensor, in C order of the elements."""
    # Set the stride to 1, because view(uint8) refuses other strides. A dim of size 1 counts as contiguous
    # with any stride (as after t.expand(1)), and flatten() keeps its stride.
    x = x.resolve_conj().resolve_neg().contiguous().flatten()
    return x.as_strided(x.shape, (1,), x.storage_offset()).view(torch.uint8)


class PendingFingerprints:
    """The fingerprint of each of ``tensors``, as of now: 16 hexadecimal digits that depend on its bytes in C
    order. Their devices compute while the host goes on.

    The shape, dtype, strides and device of a tensor do not matter. Every 8 bytes are mixed with their
    position to 64 random-looking bits, and these are summed. Two tensors of equal size with different bytes
    have the same fingerprint with probability 2^-64. Since bytes are compared, 0.0 and -0.0 differ, and NaNs
    with the same bits are equal. All devices return the same digits, because the mixing is integer
    arithmetic.

    Later writes to the tensors do not matter, if they are queued on the current stream.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._indices: dict[torch.device, list[int]] = {}
        for index, x in enumerate(tensors):
            self._indices.setdefault(x.device, []).append(index)
        # Start the computation on all devices before the host waits for the first one.
        self._sums = {
            device: _sum_words([tensors[index] for index in group]) for device, group in self._indices.items()
        }
        self._events: list[torch.cuda.Event] = []
        for device, sums in self._sums.items():
            if device.type == "cuda":
                # Wait for this copy alone later, not for what is launched until then. With non_blocking,
                # torch copies to pinned memory, so the host does not wait here.
                self._sums[device] = sums.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def wait(self) -> list[str]:
        """Return the fingerprints in the order of the tensors. The host waits once for each device, to read 8
        bytes per tensor.
        """
        for event in self._events:
            event.synchronize()
        digits = [""] * sum(map(len, self._indices.values()))
        for device, indices in self._indices.items():
            for index, value in zip(indices, self._sums[device].tolist(), strict=True):
                digits[index] = f"{value % 2**64:016x}"
        return digits


@torch.no_grad()
def joint_fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return one fingerprint of all ``tensors`` together, as an int64 tensor of shape ``[1]``.

    It depends on the bytes of the tensors and on their order, but not on their devices: like
    :class:`PendingFingerprints`, with positions that count the words of all tensors. Where one tensor ends
    and the next begins is not part of it. It is much cheaper than a fingerprint for each of many small
    tensors, which share a launch. If all tensors are on one device, so is the result, and the host does not
    wait. Without any bytes the result is 0 on the CPU.
    """
    start = 0
    sums: dict[torch.device, list[Tensor]] = {}
    for chunk in _chunks(tensors):
        words = chunk[0]
        if len(chunk) > 1:
            words = torch.cat(chunk)
        positions = torch.arange(start + 1, start + words.numel() + 1, device=words.device)
        # Not in place, because the words may be a view of the caller's weights. The sum is mixed in place.
        mixed = torch.add(words, positions, alpha=_signed(_STEP))
        _mix(mixed)
        sums.setdefault(words.device, []).append(mixed.sum(dim=0, keepdim=True))
        start += words.numel()
    if not sums:
        return torch.zeros(1, dtype=torch.int64)
    totals = [torch.cat(parts).sum(dim=0, keepdim=True) for parts in sums.values()]
    return totals[0] if len(totals) == 1 else torch.cat([x.cpu() for x in totals]).sum(dim=0, keepdim=True)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the words of ``tensors`` as lists of int64 tensors on one device, which are mixed together."""
    chunk: list[Tensor] = []
    room = 0
    for x in tensors:
        limit = _CHUNK_WORDS_CPU if x.device.type == "cpu" else _CHUNK_WORDS_GPU
        words = _words(x)
        if chunk and (words.numel() > room or chunk[0].device != words.device):
            yield chunk
            chunk = []
        if words.numel() > limit:
            for part in words.split(limit):
                yield [part]
        elif words.numel() > 0:
            room = (room if chunk else limit) - words.numel()
            chunk.append(words)
    if chunk:
        yield chunk


def _words(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` as int64, padded by zeros: a view of them if they are aligned to 8, else a copy."""
    row = tensor_bytes(x.detach())
    if row.numel() % _WORD_BYTES == 0 and row.storage_offset() % _WORD_BYTES == 0:
        return row.view(torch.int64)
    words = torch.zeros(-(-row.numel() // _WORD_BYTES), dtype=torch.int64, device=row.device)
    words.view(torch.uint8)[: row.numel()].copy_(row)
    return words


@torch.no_grad()
def _sum_words(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fingerprints of tensors on one device as int64, ``[len(tensors)]``. There is at least one tensor."""
    sizes = [-(-x.nbytes // _WORD_BYTES) for x in tensors]
    if sum(sizes) > _MAX_WORDS and len(tensors) > 1:
        half = len(tensors) // 2
        return torch.cat([_sum_words(tensors[:half]), _sum_words(tensors[half:])])
    steps = torch.arange(1, max(sizes) + 1, device=tensors[0].device) * _signed(_STEP)
    # As above: the words may be views of the caller's tensors, and the sums are mixed in place.
    mixed = steps.new_empty(sum(sizes))
    for x, part in zip(tensors, mixed.split(sizes), strict=True):
        torch.add(_words(x), steps[: part.numel()], out=part)
    _mix(mixed)
    return torch.stack([part.sum() for part in mixed.split(sizes)])


def _mix(words: Tensor) -> None:
    """Apply the output function of SplitMix64 to int64 ``words`` in place."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, _LAST_SHIFT))


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Return int64 ``words`` shifted to the right as unsigned integers. torch's own shift would copy the sign bit."""
    return (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits as the unsigned ``value``."""
    return value - 2**64 if value >= 2**63 else value
