"""Small constant tensors on a device that are computed once and kept, but never in the memory pool of a CUDA graph.

``kernels/pack.py`` and, in para_core/spatial, norm.py and resample.py decorate the functions that make their
tables. Tests: tests/kernels/test_device_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from threading import Lock
from typing import TypeVarTuple, Unpack

import torch
from torch import Tensor

KeyParts = TypeVarTuple("KeyParts")
MOST_TABLES = 256


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def new_table(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``torch.tensor(numbers)`` on ``device`` without waiting for it. Can be recorded in a CUDA graph.

    The current stream fills it. Nothing makes another stream wait for that, so a table that is kept must be
    read on the stream of its first call, or on one that waits for that stream.
    """
    if is_capturing():
        # While a CUDA graph records, copying from pageable host memory is not allowed, so fill each number on
        # the device. Filling is slower, but happens only if the first call is inside a capture.
        table = torch.empty(len(numbers), dtype=dtype, device=device)
        for entry, number in zip(table.unbind(), numbers, strict=True):
            entry.fill_(number)
        return table
    # Name the CPU: on a default device of the user's, torch.tensor would wait for its own copy.
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def keep_outside_graphs(make: Callable[[Unpack[KeyParts]], Tensor]) -> Callable[[Unpack[KeyParts]], Tensor]:
    """Decorate ``make(*key)`` to keep the tensors of the last ``MOST_TABLES`` keys. A key must include the
    device, and the dtype unless it is fixed: equal keys, such as 1 and 1.0, share a tensor. Callers must not
    write to the tensors.

    A tensor that is made during the capture of a CUDA graph is not kept, because the graph's memory pool will
    reuse its memory. A kept tensor that a captured graph reads is never dropped, because each replay reads it
    again: these come on top of ``MOST_TABLES``, one for each key that any graph of this process has read.
    """
    tables: dict[Hashable, Tensor] = {}
    recorded: dict[Hashable, Tensor] = {}
    lock = Lock()

    @wraps(make)
    def table_of(*key: *KeyParts) -> Tensor:
        if torch.compiler.is_compiling():
            # Inside torch.compile the tensor is fake, so it must not be kept.
            return make(*key)
        with lock:
            table = recorded.get(key)
            if table is None:
                # A table is taken out and put in again, so that the first one is that which was not used for longest.
                table = tables.pop(key, None)
                capturing = is_capturing()
                if table is None:
                    # Leave inference mode, because autograd cannot save an inference tensor for a later
                    # backward.
                    with torch.inference_mode(False):
                        table = make(*key)
                    if capturing:
                        return table
                if capturing:
                    recorded[key] = table
                else:
                    tables[key] = table
                if len(tables) > MOST_TABLES:
                    del tables[next(iter(tables))]
            return table

    return table_of
