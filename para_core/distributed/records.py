"""Records that ranks compare: dicts of JSON values, their digests, and texts on where they differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

Record = dict[str, Any]


@dataclass(frozen=True)
class Signature:
    """A record that must be equal on all ranks, encoded as JSON, with its 16-byte digest."""

    encoded: bytes
    digest: bytes

    @classmethod
    def of(cls, record: Record) -> Self:
        """Return the signature of ``record``, a dict of JSON values.
        Keep the result to compare it repeatedly.
        """
        encoded = json.dumps(record).encode()
        return cls(encoded, blake2b(encoded, digest_size=16).digest())


def describe_differences(records: list[Record]) -> list[str]:
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


def describe_first_difference(records: list[Record]) -> str:
    """Return a sentence on the first field that differs between rank 0 and another rank, with both values."""
    return f"the ranks of one mesh disagree about {describe_differences(records)[0]}."
