"""One small exchange before a payload moves, so that bad input is an error on every rank instead of a hang on some.

A rank that raises alone leaves the others in a collective until the group's timeout, and parts of unequal size abort
the process on gloo. So in eager code every verdict is taken from data of all ranks, which all of them have.

**What is exchanged.** What must be equal on all ranks is a record of JSON values. It travels as a digest:

1. One all-gather per mesh dim of a header of ``_HEADER.size`` bytes per rank: the digest of the record, its length in
   bytes (negative: this rank found its input bad, and the record says how), and up to ``MAX_OWN`` integers that may
   differ from rank to rank, as the sizes of a local mask do. If no rank found an error and all digests agree, that is all.
2. Otherwise the records themselves, padded to the longest. Every rank gets here or none does, because all hold the
   same headers. Every rank then raises the same error, or finds that equal values were only written differently.

A :class:`Signature` is a record with its digest. Whoever asks the same again and again keeps it, and encodes nothing::

    @lru_cache
    def _signature(shape: tuple[int, ...], dtype: torch.dtype) -> Signature:
        return signature({"shape": shape, "dtype": str(dtype)})

    try:
        check(x)
    except ValueError as error:
        agree(error, mesh)  # raises on every rank
        raise
    agree(_signature(x.shape, x.dtype), mesh)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from para_core.distributed.collectives import HostGroups, all_gather_bytes
from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh
from para_core.foreign_errors import is_closed_connection
from para_core.torch_internals import DisableTransforms

MAX_OWN = 4
# Digest, length, own integers.
_HEADER = struct.Struct(f"<16sq{MAX_OWN}q")

Record = dict[str, Any]


class Unanswered(RuntimeError):
    """A rank did not come to an exchange."""


@dataclass(frozen=True)
class Signature:
    """What must be equal on all ranks: JSON, and 16 bytes that stand for it. Made by :func:`signature`."""

    encoded: bytes
    digest: bytes


def signature(record: Record) -> Signature:
    """``record`` (JSON values, of any size) as :func:`agree` takes it; keep it where the same is asked again."""
    encoded = json.dumps(record).encode()
    return Signature(encoded, blake2b(encoded, digest_size=16).digest())


_NOTHING_WRONG = signature({})


def first_difference(records: list[Record]) -> str:
    """The first field in which a rank differs from rank 0, and both values."""
    rank, record = next((rank, record) for rank, record in enumerate(records) if record != records[0])
    fields = {**records[0], **record}
    field = next(field for field in fields if records[0].get(field, "nothing") != record.get(field, "nothing"))
    return (
        f"the ranks disagree about {field}: sequence rank 0 has {records[0].get(field, 'nothing')}, rank {rank} has "
        f"{record.get(field, 'nothing')}."
    )


def agree(
    mine: Signature | Exception,
    mesh: SequenceMesh | GuidedMesh | HostGroups,
    own: Sequence[int] = (),
    *,
    explain: Callable[[list[Record]], str] = first_difference,
) -> list[tuple[int, ...]]:
    """Raise on every rank of ``mesh``, or on none: unless all give the same signature, and none gives an exception.

    Args:
        mine: what all ranks must give alike; or the exception that this rank would raise alone (a ``TypeError``,
            ``ValueError`` or ``RuntimeError``).
        own: at most ``MAX_OWN`` integers of 64 bits that may differ. How many there are follows from the signature.
        explain: what the error says, from the records of all ranks in rank order, where they differ.

    Returns:
        ``own`` of every rank, in rank order.

    Raises:
        ValueError: two ranks differ.
        TypeError, ValueError, RuntimeError: what the first rank gave that gave one, with its rank.
    """
    failed = isinstance(mine, Exception)
    if isinstance(mine, Exception):
        mine = signature(error_record(mine))
    length = len(mine.encoded)
    header = _HEADER.pack(mine.digest, -length if failed else length, *own, *[0] * (MAX_OWN - len(own)))
    headers = list(_HEADER.iter_unpack(_gathered(header, mesh)))
    if not failed and all(found[0] == mine.digest and found[1] == length for found in headers):
        return [found[2 : 2 + len(own)] for found in headers]
    records = _records(mine.encoded, max(abs(found[1]) for found in headers), mesh)
    try:
        raise_first_error(records)
        # Values may be equal and be written differently: 1 and 1.0.
        if any(record != records[0] for record in records):
            raise ValueError(explain(records))
    except (TypeError, ValueError, RuntimeError) as error:
        setattr(error, _RAISED_ON, _groups_of(mesh))
        raise
    return [found[2 : 2 + len(own)] for found in headers]


# The attribute of an exception that names the groups on all of whose ranks it is raised.
_RAISED_ON = "_para_core_raised_on"


def _groups_of(mesh: SequenceMesh | GuidedMesh | HostGroups) -> tuple[str, ...]:
    return tuple(dim.group_name for dim in mesh.dims if dim.size > 1)


@contextmanager
def raising_on_all(mesh: SequenceMesh | GuidedMesh, what: str) -> Iterator[None]:
    """Raise at the end on every rank of ``mesh`` what one rank raises inside, with ``what`` as a prefix. Every rank enters.

    Blocks over the same ranks nest: an exception that an inner exchange has raised on all ranks is not exchanged again. So a rank that
    fails before it enters the inner block meets the others in their inner exchange.

    Raises:
        TypeError, ValueError, RuntimeError: The exception of the rank, with its type; a RuntimeError for any other type.
    """
    try:
        yield
    except Exception as error:
        if _groups_of(mesh) in ((), getattr(error, _RAISED_ON, None)):
            raise
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        reason = str(error) if kind is type(error) else f"{type(error).__name__}: {error}"
        agree(kind(f"{what}: {reason}"), mesh)
        raise
    agree(_NOTHING_WRONG, mesh)


def exchange(record: Record, mesh: SequenceMesh | GuidedMesh) -> list[Record]:
    """The records (JSON values) of all ranks of ``mesh``, in rank order: two all-gathers per mesh dim.

    For values that differ from rank to rank; :func:`agree` asks whether they are equal, for less.
    """
    encoded = json.dumps(record).encode()
    lengths = struct.iter_unpack("<q", _gathered(struct.pack("<q", len(encoded)), mesh))
    return _records(encoded, max(length for (length,) in lengths), mesh)


def _records(encoded: bytes, size: int, mesh: SequenceMesh | GuidedMesh | HostGroups) -> list[Record]:
    gathered = _gathered(encoded.ljust(size), mesh)
    return [json.loads(gathered[start : start + size]) for start in range(0, len(gathered), size)]


def _gathered(row: bytes, mesh: SequenceMesh | GuidedMesh | HostGroups) -> bytes:
    """The equally long rows of all ranks of ``mesh``, in rank order."""
    by_dim = mesh.by_dim if isinstance(mesh, HostGroups) else None
    # These bytes are no input of a function that is being transformed.
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
    """What it means that a collective over ``dim`` ended in ``error``, and what to do."""
    if not is_closed_connection(error):
        return (
            f"no answer from all {dim.size} ranks of mesh dim {dim.name!r} within the group's timeout. Most likely another rank "
            "raised an exception of its own, or died: its log has the reason."
        )
    default = dim.group is dist.group.WORLD
    return (
        f"the connections of mesh dim {dim.name!r} are closed: an earlier call over its process group timed out, on this rank or "
        "another, or a rank has died; gloo does not open them again. "
        + ("It is the default group, which a new mesh over all ranks takes, too. " if default else "")
        + "If all processes live, call torch.distributed.destroy_process_group() and init_process_group() on each, make the "
        "mesh anew, and parallelize with it; otherwise start them again."
    )


def raise_first_error(records: list[Record]) -> None:
    """Raise what the first rank that found its input bad wrote under ``"error"``; the same on every rank."""
    for rank, record in enumerate(records):
        if record.get("error") is not None:
            kind = {"TypeError": TypeError, "RuntimeError": RuntimeError}.get(record["kind"], ValueError)
            raise kind(f"sequence rank {rank}: {record['error']}")


def error_record(error: Exception) -> Record:
    """What :func:`raise_first_error` raises on every rank."""
    return {"error": str(error), "kind": type(error).__name__}
