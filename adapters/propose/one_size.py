"""Make up the second, larger call for a model that accepts one size only: the observed call with one more token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from para_core.adapters.propose.observe import ObservedCall, TensorRecord, tensors_of


def imagined_larger(observed: ObservedCall) -> Iterator[ObservedCall]:
    """Yield copies of ``observed`` with one more token, one copy for each length that may be the number of tokens.

    A size counts as the number of tokens if it equals that length, or that length plus the length of another tensor
    that a block receives (such as text). This is a guess; the check of the resulting plan on virtual ranks confirms or
    refutes it.
    """
    # Token tensors are [B, S, C], so dim 1 of each 3-dim floating-point argument is a candidate.
    lengths = {
        record.shape[1]: None
        for call in observed.calls
        for record in tensors_of(dict(call.arguments))
        if len(record.shape) == 3 and record.dtype.is_floating_point
    }
    for length in lengths:

        def grow(size: int, length: int = length) -> int:
            return size + 1 if size == length or size - length in lengths else size

        if any(length == call.queries or grow(call.keys) != call.keys for call in observed.attention):
            yield _larger(observed, length, grow)


def _larger(observed: ObservedCall, length: int, grow: Callable[[int], int]) -> ObservedCall:
    def change(value: Any) -> Any:
        if isinstance(value, TensorRecord):
            shape = value.shape
            # Do not change the last dim of [B, S, C]: it holds channels, even if there are as many channels as tokens.
            num_dims = 2 if len(shape) == 3 and value.dtype.is_floating_point and length in shape[:2] else len(shape)
            return replace(value, shape=(*[grow(size) for size in shape[:num_dims]], *shape[num_dims:]))
        if isinstance(value, Mapping):
            return {key: change(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [change(entry) for entry in value]
        return value + 1 if type(value) is int and value == length else value

    calls = [replace(call, arguments=change(call.arguments), output=change(call.output)) for call in observed.calls]
    attention = [replace(call, queries=grow(call.queries), keys=grow(call.keys)) for call in observed.attention]
    return replace(observed, inputs=change(observed.inputs), calls=calls, attention=attention)
