"""A second observation for a model that accepts one size only: the first one, as if it had one token more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from para_core.adapters.propose.candidates import tensors_of
from para_core.adapters.propose.observe import ModuleCall, ObservedCall, Seen


def imagined_larger(seen: ObservedCall) -> Iterator[ObservedCall]:
    """``seen`` with one token more, for each length that may be the number of tokens.

    Every size that equals that length is taken to count tokens, and so is every size that equals it together with the length of another
    tensor that a block is given (text). That is a guess, which a plan's check on virtual ranks confirms or refutes.
    """
    lengths = dict.fromkeys(length for call in seen.calls for length in _lengths(call))
    for length in lengths:
        if any(length in (one.queries, one.keys) or _others(one.keys, length, lengths) for one in seen.attention):
            yield _larger(seen, length, lengths)


def _lengths(call: ModuleCall) -> list[int]:
    """The lengths of sequences ``[B, S, C]`` that a module is given."""
    return [x.shape[1] for x in tensors_of(dict(call.given)) if len(x.shape) == 3 and x.dtype.is_floating_point]


def _others(size: int, length: int, lengths: Mapping[int, Any]) -> bool:
    return size - length in lengths


def _larger(seen: ObservedCall, length: int, lengths: Mapping[int, Any]) -> ObservedCall:
    def grown(size: int) -> int:
        return size + 1 if size == length or _others(size, length, lengths) else size

    def change(value: Any) -> Any:
        if isinstance(value, Seen):
            return replace(value, shape=_grown_shape(value, length, grown))
        if isinstance(value, Mapping):
            return {key: change(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [change(one) for one in value]
        return value + 1 if type(value) is int and value == length else value

    calls = [replace(call, given=change(call.given), returned=change(call.returned)) for call in seen.calls]
    attention = [replace(one, queries=grown(one.queries), keys=grown(one.keys)) for one in seen.attention]
    return replace(seen, inputs=change(seen.inputs), calls=calls, attention=attention)


def _grown_shape(seen: Seen, length: int, grown: Any) -> tuple[int, ...]:
    # Of [B, S, C] the last dim holds channels, also if there are as many.
    if len(seen.shape) == 3 and seen.dtype.is_floating_point and length in seen.shape[:2]:
        return (*[grown(size) for size in seen.shape[:2]], seen.shape[2])
    return tuple(grown(size) for size in seen.shape)
