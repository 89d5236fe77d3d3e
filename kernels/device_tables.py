"""Small tensors of constants on a device: computed once, kept, and never kept in the memory pool of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from threading import Lock
from typing import TypeVarTuple, Unpack

import torch
from torch import Tensor

Key = TypeVarTuple("Key")
MOST_TABLES = 256


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def new_table(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``torch.tensor(numbers)`` on ``device``. The host does not wait; a CUDA graph can record it."""
    if is_capturing():
        # A copy from pageable memory cannot be recorded. Filling is slower, but a call before the capture makes it unnecessary.
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def kept_outside_graphs(make: Callable[[Unpack[Key]], Tensor]) -> Callable[[Unpack[Key]], Tensor]:
    """Decorate ``make(*key)``, so that the tensors of the last ``MOST_TABLES`` keys are kept, one of which is the device.

    A tensor that is made while a CUDA graph is recorded lies in the memory pool of the graph, which uses its memory again. It is
    returned, and not kept. A tensor that a graph refers to is kept for good, because each replay reads it.
    """
    tables: dict[Hashable, Tensor] = {}
    recorded: dict[Hashable, Tensor] = {}
    lock = Lock()

    @wraps(make)
    def table_of(*key: *Key) -> Tensor:
        if torch.compiler.is_compiling():
            # A tensor of a tracer is gone with the graph.
            return make(*key)
        with lock:
            table = recorded.get(key)
            if table is None:
                table = tables.pop(key, None)
                capturing = is_capturing()
                if table is None:
                    # An inference tensor could not be saved for a backward later.
                    with torch.inference_mode(False):
                        table = make(*key)
                    if capturing:
                        return table
                (recorded if capturing else tables)[key] = table
                if len(tables) > MOST_TABLES:
                    del tables[next(iter(tables))]
            return table

    return table_of
