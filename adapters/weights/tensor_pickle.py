"""Separate the tensors of a nested object from its other content, so that each can be sent or stored by itself."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def split_tensors(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return ``value`` pickled without its tensors, and these tensors, each once, in the order in which they appear."""
    # Hold the tensors here: Python may give the id of a freed tensor to another one.
    tensors: dict[int, tuple[int, Tensor]] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return tensors.setdefault(id(obj), (len(tensors), obj))[0] if isinstance(obj, Tensor) else None

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue(), [x for _, x in tensors.values()]


def join_tensors(pickled: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the value that :func:`split_tensors` took apart, with ``tensors`` in place of its tensors."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(pickled)).load()
