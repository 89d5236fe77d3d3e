"""Compare small records between ranks before data moves, so that bad input raises on every rank instead of hanging
some.

A rank that raises alone leaves the others in a collective until the group's timeout, and parts of unequal size abort
the process on gloo. In eager code every verdict is therefore computed from data that all ranks hold.

**Protocol.** Values that must be equal on all ranks form a record of JSON values. The record is compared by digest:

1. One all-gather per mesh dim of a header of ``_HEADER.size`` bytes per rank: the digest of the record, its length in
   bytes (negative if this rank found its input bad; the record then holds the error), and up to ``MAX_EXTRAS`` integers
   that may differ between ranks, for example the sizes of a local mask. If no rank reports an error and all digests
   are equal, the check ends here.
2. Otherwise the ranks gather the records themselves, padded to the longest. All ranks hold the same headers, so either
   all of them or none reach this step. Every rank then raises the same error, or sees that the values are equal and
   only their JSON differs (1 and 1.0).

A :class:`Signature` is a record with its digest. Code that sends the same record repeatedly caches the signature::

    @lru_cache
    def _signature(shape: tuple[int, ...], dtype: torch.dtype) -> Signature:
        return signature({"shape": shape, "dtype": str(dtype)})

    try:
        validate(x)
    except ValueError as error:
        check_consistent(error, mesh)  # raises on every rank
        raise
    check_consistent(_signature(x.shape, x.dtype), mesh)
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

from para_core.distributed.collectives import HostGroups, all_gather_bytes
from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh
from para_core.foreign_errors import is_closed_connection
from para_core.torch_internals import DisableTransforms

MAX_EXTRAS = 5
# Digest, length, extras.
_HEADER = struct.Struct(f"<16sq{MAX_EXTRAS}q")

Record = dict[str, Any]
# Called with the arguments of a call by name. Raises on every rank if they differ between ranks.
RequireEqual = Callable[[Mapping[str, Any]], None]


class Unanswered(RuntimeError):
    """A rank did not take part in an exchange."""


@dataclass(frozen=True)
class Signature:
    """A record that must be equal on all ranks, as JSON, and its digest of 16 bytes. Made by :func:`signature`."""

    encoded: bytes
    digest: bytes


def signature(record: Record) -> Signature:
    """``record`` (JSON values, of any size) as :func:`check_consistent` takes it; keep it where the same is asked
    again.
    """
    encoded = json.dumps(record).encode()
    return Signature(encoded, blake2b(encoded, digest_size=16).digest())


_NOTHING_WRONG = signature({})


def differing_fields(records: list[Record]) -> list[str]:
    """Return a clause with both values for each field in which the first rank that differs from rank 0 differs."""
    first = records[0]
    rank, other = next((rank, record) for rank, record in enumerate(records) if record != first)
    return [
        f"{field}: rank 0 has {first.get(field, 'nothing')}, rank {rank} has {other.get(field, 'nothing')}"
        for field in {**first, **other}
        if first.get(field, "nothing") != other.get(field, "nothing")
    ]


def first_difference(records: list[Record]) -> str:
    """Return a sentence that names the first field in which a rank differs from rank 0, with both values."""
    return f"the ranks of one mesh disagree about {differing_fields(records)[0]}."


def check_consistent(
    local: Signature | Exception,
    mesh: SequenceMesh | GuidedMesh | HostGroups,
    extras: Sequence[int] = (),
    *,
    explain: Callable[[list[Record]], str] = first_difference,
) -> list[tuple[int, ...]]:
    """Raise on every rank of ``mesh`` unless all ranks pass the same signature and none passes an exception.

    Every rank of ``mesh`` must call this function.

    Args:
        local: The signature that must be equal on all ranks, or the exception that this rank would otherwise raise
            alone (a ``TypeError``, ``ValueError`` or ``RuntimeError``).
        extras: At most ``MAX_EXTRAS`` integers of 64 bits that may differ between ranks. Their number must be the same
            on all ranks with the same signature.
        explain: Returns the error message from the records of all ranks, in rank order, if they differ.

    Returns:
        The ``extras`` of every rank, in rank order.

    Raises:
        ValueError: Two ranks differ.
        TypeError, ValueError, RuntimeError: The exception of the first rank that passed one, with its rank.
    """
    failed = isinstance(local, Exception)
    if isinstance(local, Exception):
        local = signature(error_record(local))
    length = len(local.encoded)
    padding = [0] * (MAX_EXTRAS - len(extras))
    header = _HEADER.pack(local.digest, -length if failed else length, *extras, *padding)
    headers = list(_HEADER.iter_unpack(_all_gather_rows(header, mesh)))
    if not failed and all(digest == local.digest and size == length for digest, size, *_ in headers):
        return [row[2 : 2 + len(extras)] for row in headers]
    records = _all_gather_records(local.encoded, max(abs(row[1]) for row in headers), mesh)
    try:
        raise_first_error(records)
        # Equal values may have different JSON: 1 and 1.0.
        if any(record != records[0] for record in records):
            raise ValueError(explain(records))
    except (TypeError, ValueError, RuntimeError) as error:
        setattr(error, _RAISED_ON, _groups_of(mesh))
        raise
    return [row[2 : 2 + len(extras)] for row in headers]


# Attribute of an exception: names of the process groups on all of whose ranks it was raised.
_RAISED_ON = "_para_core_raised_on"


def _groups_of(mesh: SequenceMesh | GuidedMesh | HostGroups) -> tuple[str, ...]:
    return tuple(dim.group_name for dim in mesh.dims if dim.size > 1)


@contextmanager
def raising_on_all(mesh: SequenceMesh | GuidedMesh, what: str) -> Iterator[None]:
    """Raise an exception of one rank's block on every rank of ``mesh``, prefixed by ``what``. Every rank must enter.

    Blocks over the same ranks may nest: an exception that an inner exchange has raised on all ranks is not exchanged
    again. A rank that fails before it enters the inner block therefore meets the others in their inner exchange.

    Raises:
        TypeError, ValueError, RuntimeError: The exception of the rank, with its type; a RuntimeError for any other
            type.
    """
    try:
        yield
    except Exception as error:
        if _groups_of(mesh) in ((), getattr(error, _RAISED_ON, None)):
            raise
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        reason = str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
        check_consistent(kind(f"{what}: {reason}"), mesh)
        raise
    check_consistent(_NOTHING_WRONG, mesh)


def exchange(record: Record, mesh: SequenceMesh | GuidedMesh) -> list[Record]:
    """Return the records (JSON values) of all ranks of ``mesh``, in rank order. Costs two all-gathers per mesh dim.

    Use :func:`check_consistent`, which costs one, if the records only have to be equal.
    """
    encoded = json.dumps(record).encode()
    lengths = struct.iter_unpack("<q", _all_gather_rows(struct.pack("<q", len(encoded)), mesh))
    return _all_gather_records(encoded, max(length for (length,) in lengths), mesh)


def _all_gather_records(encoded: bytes, size: int, mesh: SequenceMesh | GuidedMesh | HostGroups) -> list[Record]:
    gathered = _all_gather_rows(encoded.ljust(size), mesh)
    return [json.loads(gathered[start : start + size]) for start in range(0, len(gathered), size)]


def _all_gather_rows(row: bytes, mesh: SequenceMesh | GuidedMesh | HostGroups) -> bytes:
    """Return the concatenated ``row`` of all ranks of ``mesh``, in rank order. Rows must be equally long."""
    by_dim = mesh.by_dim if isinstance(mesh, HostGroups) else None
    # These bytes are not an input of a function that torch.func may be transforming.
    with DisableTransforms():
        rows = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        for dim in mesh.dims:
            if dim.size == 1:
                continue
            try:
                rows = all_gather_bytes(rows, dim, by_dim)
            except RuntimeError as error:
                raise Unanswered(_unanswered(dim, error)) from error
        return rows.numpy().tobytes()


def _unanswered(dim: MeshDim, error: RuntimeError) -> str:
    """Return an error message for a collective over ``dim`` that ended in ``error``, with the way out."""
    if not is_closed_connection(error):
        return (
            f"no answer from all {dim.size} ranks of mesh dim {dim.name!r} within the group's timeout. Most likely "
            "another rank raised an exception or died; its log has the reason."
        )
    default = dim.group is dist.group.WORLD
    return (
        f"the connections of mesh dim {dim.name!r} are closed: an earlier call over its process group timed out, on "
        "this rank or another, or a rank has died; gloo does not reopen them. "
        + ("It is the default group, which a new mesh over all ranks would use again. " if default else "")
        + "If all processes are alive, call torch.distributed.destroy_process_group() and init_process_group() on "
        "each, create "
        "the mesh again, and parallelize with it; otherwise restart them."
    )


def raise_first_error(records: list[Record]) -> None:
    """Raise the first error in ``records`` (made by :func:`error_record`), prefixed by its rank. Equal on every
    rank.
    """
    for rank, record in enumerate(records):
        if record.get("error") is not None:
            kind = {"TypeError": TypeError, "RuntimeError": RuntimeError}.get(record["kind"], ValueError)
            raise kind(f"sequence rank {rank}: {record['error']}")


def error_record(error: Exception) -> Record:
    """Return the record from which :func:`raise_first_error` raises ``error`` on every rank."""
    return {"error": str(error), "kind": type(error).__name__}


class ComparesInputs(Protocol):
    """A handler of the calls of a model, which compares their arguments over the ranks unless ``inputs_verified``."""

    inputs_verified: bool


@contextmanager
def inputs_verified(handlers: Iterable[ComparesInputs | None]) -> Iterator[None]:
    """Let ``handlers`` compare no arguments inside the ``with`` block, because the caller has verified that they are
    equal. Entries that are None are ignored.
    """
    before = [(handler, handler.inputs_verified) for handler in handlers if handler is not None]
    for handler, _ in before:
        handler.inputs_verified = True
    try:
        yield
    finally:
        for handler, verified in before:
            handler.inputs_verified = verified
