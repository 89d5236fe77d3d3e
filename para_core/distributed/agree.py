"""Compare small records between ranks before tensors are sent, so that invalid input raises on every rank.

A rank that raises alone would leave the others in a collective until the group's timeout. With gloo, tensors
of unexpected sizes even abort the process. In eager code all ranks therefore exchange what they need to make
the same decision to raise.

**Protocol.** Values that must be equal on all ranks form a record of JSON values. Records are compared by
digest:

1. One all-gather per mesh dim sends a header of ``_HEADER.size`` bytes per rank. It contains the digest of
   the record, its length in bytes (negative if this rank found its input invalid; the record then contains
   the error), and up to ``MAX_EXTRAS`` integers that may differ between ranks, for example the sizes of a
   local mask. If no rank reports an error and all digests are equal, the check ends here.
2. Otherwise the ranks gather the records themselves, padded to the longest one. All ranks have the same
   headers, so either all ranks reach this step or none. Every rank then raises the same error, or finds that
   only the JSON differs (1 and 1.0), but not the values, and continues.

A :class:`Signature` is a record with its digest. Code that sends the same record repeatedly caches the
signature. A rank whose input is invalid passes its exception to :func:`check_consistent`, which then raises
on every rank.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.distributed.collectives import HostGroups, all_gather_bytes, tensor_bytes
from para_core.distributed.late_ranks import Unanswered
from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh
from para_core.foreign_errors import is_closed_connection
from para_core.torch_internals import DisableTransforms

MAX_EXTRAS = 5
# A header contains a digest, the length of the record, and the extras.
_HEADER = struct.Struct(f"<16sq{MAX_EXTRAS}q")

Record = dict[str, Any]
# A function that takes the arguments of a call by name, and raises on every rank if they differ between
# ranks.
RequireEqual = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Signature:
    """A record that must be equal on all ranks, encoded as JSON, with its 16-byte digest; see :func:`signature`."""

    encoded: bytes
    digest: bytes


def signature(record: Record) -> Signature:
    """Convert ``record``, a dict of JSON values, to a :class:`Signature`.
    Cache the result for repeated comparisons.
    """
    encoded = json.dumps(record).encode()
    return Signature(encoded, blake2b(encoded, digest_size=16).digest())


_NOTHING_WRONG = signature({})


def differing_fields(records: list[Record]) -> list[str]:
    """Return a phrase for each field of the records that differs between rank 0 and another rank, with both
    values.

    ``records`` are those of all ranks, and at least one must differ from the first. If several ranks differ
    from rank 0, only the first of these is described.
    """
    first = records[0]
    rank, other = next((rank, record) for rank, record in enumerate(records) if record != first)
    return [
        f"{field}: rank 0 has {first.get(field, 'nothing')}, rank {rank} has {other.get(field, 'nothing')}"
        for field in {**first, **other}
        if first.get(field, "nothing") != other.get(field, "nothing")
    ]


def first_difference(records: list[Record]) -> str:
    """Return a sentence on the first field that differs between rank 0 and another rank, with both values."""
    return f"the ranks of one mesh disagree about {differing_fields(records)[0]}."


def check_consistent(
    local: Signature | Exception,
    mesh: SequenceMesh | GuidedMesh | HostGroups,
    extras: Sequence[int] = (),
    *,
    explain: Callable[[list[Record]], str] = first_difference,
    call: str = "this call",
) -> list[tuple[int, ...]]:
    """Raise on every rank of ``mesh`` unless all ranks pass the same signature and none passes an exception.

    Every rank of ``mesh`` must call this function. ``local`` is the signature, or the exception that this
    rank would otherwise raise alone (a ``TypeError``, ``ValueError``, ``ImportError`` or ``RuntimeError``).

    Args:
        extras: At most ``MAX_EXTRAS`` 64-bit integers that may differ between ranks. Their number must be the
            same on all ranks with the same signature.
        explain: Returns the error message if the records differ, given the records of all ranks in order.
        call: The user's call that every rank must make, such as "the FluxPipeline", for the log if ranks are
            late.

    Returns:
        The ``extras`` of every rank, in rank order.

    Raises:
        ValueError: The signatures of two ranks differ.
        TypeError, ValueError, ImportError, RuntimeError: The exception of the first rank that passed one,
            with the number of that rank in its message.
    """
    failed = isinstance(local, Exception)
    if isinstance(local, Exception):
        local = signature(error_record(local))
    length = len(local.encoded)
    padding = [0] * (MAX_EXTRAS - len(extras))
    header = _HEADER.pack(local.digest, -length if failed else length, *extras, *padding)
    headers = list(_HEADER.iter_unpack(_all_gather_rows(header, mesh, call)))
    if not failed and all(digest == local.digest and size == length for digest, size, *_ in headers):
        return [row[2 : 2 + len(extras)] for row in headers]
    records = _all_gather_records(local.encoded, max(abs(row[1]) for row in headers), mesh)
    try:
        raise_first_error(records)
        # Compare values, not digests, because equal values may have different JSON: 1 and 1.0.
        if any(record != records[0] for record in records):
            raise ValueError(explain(records))
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        setattr(error, _RAISED_ON, _groups_of(mesh))
        raise
    return [row[2 : 2 + len(extras)] for row in headers]


# An exception that was raised on all ranks of a mesh has an attribute of this name, which lists the mesh's
# process groups.
_RAISED_ON = "_para_core_raised_on"


def _groups_of(mesh: SequenceMesh | GuidedMesh | HostGroups) -> tuple[str, ...]:
    return tuple(dim.group_name for dim in mesh.dims if dim.size > 1)


@contextmanager
def raising_on_all(mesh: SequenceMesh | GuidedMesh, what: str, *, call: str = "this call") -> Iterator[None]:
    """Return a context manager that raises an exception of one rank on every rank of ``mesh``, with ``what``
    as prefix.

    Every rank must enter the context. Contexts over the same ranks may be nested: an exception that an inner
    context has raised on all ranks is not exchanged again. If a rank fails before it enters an inner context,
    its exchange at the end of the outer context meets the exchange with which the other ranks end the inner
    one. ``call`` names the user's call for the log if ranks are late.

    Raises:
        TypeError, ValueError, ImportError, RuntimeError: That of the rank that failed. Other types become a
            RuntimeError.
    """
    try:
        yield
    except Exception as error:
        if _groups_of(mesh) in ((), getattr(error, _RAISED_ON, None)):
            raise
        kind = type(error) if type(error) in (TypeError, ValueError, ImportError) else RuntimeError
        reason = str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
        check_consistent(kind(f"{what}: {reason}"), mesh, call=call)
        raise
    check_consistent(_NOTHING_WRONG, mesh, call=call)


def exchange(record: Record, mesh: SequenceMesh | GuidedMesh) -> list[Record]:
    """Return the records of all ranks of ``mesh`` in rank order. A record is a dict of JSON values.

    The exchange costs two all-gathers per mesh dim. To check that records are equal, use
    :func:`check_consistent`, which costs one all-gather.
    """
    return [json.loads(data) for data in exchange_bytes(json.dumps(record).encode(), mesh)]


def exchange_bytes(data: bytes, mesh: SequenceMesh | GuidedMesh) -> list[bytes]:
    """Return the ``data`` of all ranks of ``mesh`` in rank order, which may differ in length."""
    lengths = [
        length for (length,) in struct.iter_unpack("<q", _all_gather_rows(struct.pack("<q", len(data)), mesh))
    ]
    size = max(lengths)
    gathered = _all_gather_rows(data.ljust(size), mesh)
    return [gathered[rank * size :][:length] for rank, length in enumerate(lengths)]


def _all_gather_records(
    encoded: bytes, size: int, mesh: SequenceMesh | GuidedMesh | HostGroups
) -> list[Record]:
    gathered = _all_gather_rows(encoded.ljust(size), mesh)
    return [json.loads(gathered[start : start + size]) for start in range(0, len(gathered), size)]


def _all_gather_rows(
    row: bytes, mesh: SequenceMesh | GuidedMesh | HostGroups, call: str = "this call"
) -> bytes:
    """Return the concatenation of ``row`` from all ranks of ``mesh``, in rank order.
    All rows have the same length.
    """
    by_dim = mesh.by_dim if isinstance(mesh, HostGroups) else None
    # Disable torch.func transforms, because the function being transformed does not depend on these bytes.
    with DisableTransforms():
        rows = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        for dim in mesh.dims:
            if dim.size == 1:
                continue
            try:
                rows = all_gather_bytes(rows, dim, by_dim, call=call)
            except Unanswered:
                raise
            except RuntimeError as error:
                raise Unanswered(_unanswered(dim, error)) from error
        return rows.numpy().tobytes()


def _unanswered(dim: MeshDim, error: RuntimeError) -> str:
    """Return a message for a failed collective over ``dim``: the likely reason for ``error``, and what to do."""
    if not is_closed_connection(error):
        return (
            f"no answer from all {dim.size} ranks of mesh dim {dim.name!r} within the group's timeout. Every rank must "
            "make this call, not one under 'if rank == 0'. If they all do, another rank raised an exception or died "
            "(its log has the reason), or was slow (set a larger timeout=)."
        )
    default = dim.group is dist.group.WORLD
    return (
        f"the connections of mesh dim {dim.name!r} are closed: a rank has ended, perhaps because it did not make this "
        "call, which every rank must make, or an earlier call over the process group timed out, on this rank or "
        "another; gloo does not reopen them. "
        + ("It is the default group, which a new mesh over all ranks would use again. " if default else "")
        + "If all processes are alive, call torch.distributed.destroy_process_group() and init_process_group() on "
        "each, create "
        "the mesh again, and parallelize with it; otherwise restart them."
    )


def raise_first_error(records: list[Record]) -> None:
    """Raise the first error among the ``records`` of all ranks, if any, and name its rank.

    A record is an error if :func:`error_record` returned it. All ranks have the same records, so all ranks
    raise.
    """
    for rank, record in enumerate(records):
        if record.get("error") is not None:
            kinds = {kind.__name__: kind for kind in (TypeError, ImportError, RuntimeError)}
            raise kinds.get(record["kind"], ValueError)(f"sequence rank {rank}: {record['error']}")


def error_record(error: Exception) -> Record:
    """Convert ``error`` to a record.
    Given this record, :func:`raise_first_error` raises the error on every rank.
    """
    return {"error": str(error), "kind": type(error).__name__}


class ComparesInputs(Protocol):
    """A hook on model calls that compares their arguments between ranks, unless its ``inputs_verified`` is True."""

    inputs_verified: bool


@contextmanager
def inputs_verified(handlers: Iterable[ComparesInputs | None]) -> Iterator[None]:
    """Set ``inputs_verified`` of the ``handlers`` that are not None to True inside the ``with`` block, then
    restore it.

    Use this if the caller has verified that the arguments are equal on all ranks.
    """
    before = [(handler, handler.inputs_verified) for handler in handlers if handler is not None]
    for handler, _ in before:
        handler.inputs_verified = True
    try:
        yield
    finally:
        for handler, verified in before:
            handler.inputs_verified = verified


# The following functions compute fingerprints of tensors, by which ranks compare their inputs.

_WORD_BYTES = 8
# Process at most this number of 64-bit words at a time (128 MiB, and as much again for intermediate results),
# unless a single tensor has more.
_MAX_WORDS = 1 << 24
# A digest of many tensors is computed in chunks of this number of 64-bit words: few enough to stay in the
# cache of a CPU, many enough that a GPU computes longer than it takes to launch the kernels (32 MiB).
_CHUNK_WORDS_CPU, _CHUNK_WORDS_GPU = 1 << 16, 1 << 22
# Constants of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): the step
# between positions, and the shifts and factors of its output function, which is Stafford's variant 13 of the
# finalizer of MurmurHash3.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """Return the fingerprint of each tensor: 16 hexadecimal digits that depend on its bytes in C order.

    The shape, dtype, strides and device of a tensor do not matter. Every 8 bytes are mixed with their
    position to 64 random-looking bits, and these are summed. Two tensors of equal size with different bytes
    have the same fingerprint with probability 2^-64. Since bytes are compared, 0.0 and -0.0 differ, and NaNs
    with the same bits are equal. All devices return the same digits, because the mixing is integer
    arithmetic.

    The host waits once for each device, to read 8 bytes per tensor. To wait later, use
    :class:`PendingFingerprints`.
    """
    return PendingFingerprints(tensors).wait()


class PendingFingerprints:
    """Fingerprints of ``tensors``, as of now, that their devices compute while the host goes on.

    Later writes to the tensors do not matter, if they are queued on the current stream.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._indices: dict[torch.device, list[int]] = {}
        for index, x in enumerate(tensors):
            self._indices.setdefault(x.device, []).append(index)
        # Start the computation on all devices before the host waits for the first one.
        self._sums = {
            device: _sums([tensors[index] for index in group]) for device, group in self._indices.items()
        }
        self._events: list[torch.cuda.Event] = []
        for device, sums in self._sums.items():
            if device.type == "cuda":
                # Wait for this copy alone later, not for what is launched until then.
                self._sums[device] = sums.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def wait(self) -> list[str]:
        """Return the fingerprints in the order of the tensors; see :func:`fingerprints`."""
        for event in self._events:
            event.synchronize()
        digits = [""] * sum(map(len, self._indices.values()))
        for device, indices in self._indices.items():
            for index, value in zip(indices, self._sums[device].tolist(), strict=True):
                digits[index] = f"{value % 2**64:016x}"
        return digits


@torch.no_grad()
def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return one fingerprint of all ``tensors`` together, as an int64 tensor of shape ``[1]``.

    It depends on the bytes of the tensors and on their order, but not on their devices: like
    :func:`fingerprints`, with positions that count the words of all tensors. It is much cheaper than a
    fingerprint for each of many tensors: a hundred of them share a launch. If all tensors are on one device,
    so is the digest, and the host does not wait.
    """
    start = 0
    sums: dict[torch.device, list[Tensor]] = {}
    for chunk in _chunks(tensors):
        words = torch.cat(chunk)
        positions = torch.arange(start + 1, start + words.numel() + 1, device=words.device)
        _mix(words.add_(positions, alpha=_signed(_STEP)))
        sums.setdefault(words.device, []).append(words.sum(dim=0, keepdim=True))
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
    """Return the bytes of ``x`` as int64, padded by zeros. Copies only if the bytes are not aligned to 8."""
    row = tensor_bytes(x.detach())
    if row.numel() % _WORD_BYTES == 0 and row.storage_offset() % _WORD_BYTES == 0:
        return row.view(torch.int64)
    words = torch.zeros(-(-row.numel() // _WORD_BYTES), dtype=torch.int64, device=row.device)
    words.view(torch.uint8)[: row.numel()].copy_(row)
    return words


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
    _mix(words)
    return torch.stack([part.sum() for part in parts])


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
