"""One small exchange before a payload moves, so that bad input is an error on every rank instead of a hang on some.

A rank that raises alone leaves the others in a collective until the group's timeout, and parts of unequal size abort
the process on gloo. So in eager code every verdict is taken from the records of all ranks, which all of them have.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from para_core.collectives import all_gather_bytes
from para_core.mesh import GuidedMesh, MeshDim, SequenceMesh

# Bytes per rank: fixed, so that the exchange itself cannot be uneven. A record is a few hundred.
RECORD_SIZE = 4096

Record = dict[str, Any]


def exchange(record: Record, mesh: SequenceMesh | GuidedMesh) -> list[Record]:
    """The records of all ranks of ``mesh``, in rank order: one all-gather per mesh dim of more than one rank.

    Args:
        record: JSON values, at most ``RECORD_SIZE`` bytes when encoded.
    """
    encoded = json.dumps(record).encode()
    if len(encoded) > RECORD_SIZE:
        raise ValueError(f"a record of {len(encoded)} bytes does not fit into {RECORD_SIZE}: {record}")
    rows = torch.frombuffer(bytearray(encoded.ljust(RECORD_SIZE)), dtype=torch.uint8)
    for dim in mesh.dims:
        if dim.size > 1:
            rows = _gathered(rows, dim)
    return [json.loads(bytes(row.tolist())) for row in rows.view(mesh.ranks, RECORD_SIZE)]


def _gathered(rows: torch.Tensor, dim: MeshDim) -> torch.Tensor:
    try:
        return all_gather_bytes(rows.reshape(-1), dim)
    except RuntimeError as error:
        raise RuntimeError(
            f"no answer from all {dim.size} ranks of mesh dim {dim.name!r} within the group's timeout. Most likely another "
            "rank raised an exception of its own, or died: its log has the reason."
        ) from error


def raise_first_error(records: list[Record]) -> None:
    """Raise what the first rank that found its input bad wrote under ``"error"``; the same on every rank."""
    for rank, record in enumerate(records):
        if record.get("error") is not None:
            kind = {"TypeError": TypeError, "RuntimeError": RuntimeError}.get(record["kind"], ValueError)
            raise kind(f"sequence rank {rank}: {record['error']}")


def error_record(error: Exception) -> Record:
    """What :func:`raise_first_error` raises on every rank; a text that is too long for a record loses its end."""
    text = str(error)
    # Measured as it is sent: a character that is not ASCII takes six bytes or more.
    while len(json.dumps(text)) > RECORD_SIZE * 3 // 4:
        text = text[: len(text) * 7 // 8]
    return {"error": text, "kind": type(error).__name__}
