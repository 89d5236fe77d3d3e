"""Guess where tokens may be sharded first, from what grows from a smaller to a larger call.

``propose.py`` tries the starts in order. Where tokens are gathered is in ``region.py``. The files that guess
rules and block stacks use :func:`grown_dims` and :func:`streams_of`, too. Parameters that grow by equal
lengths count as one sequence, so the two observed calls must make image and text grow differently. Tests:
tests/adapters/propose/test_structures.py, on whole models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from para_core.adapters.propose.records import ModuleCall, ObservedCall, TensorRecord, tensors_of

# A length in the smaller call, and the same length in the larger call.
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Start:
    """A module at whose inputs tokens may be sharded: the first block of a list, or a module that contains
    all blocks.

    Args:
        block: Name of the module.
        entries: The length of the sequence in the smaller and in the larger call. Each entry is a token, or
            in ``[B, T, H, W, C]`` a frame of ``group`` tokens in the dims ``together``.
        streams: The parameters of the module that hold the tokens.
        dim: The dim of the entries.
        together: The dims of the tokens of one entry, if an entry is no token.
        group: Number of tokens of an entry.
    """

    block: str
    entries: Lengths
    streams: tuple[str, ...]
    dim: int
    together: tuple[int, ...] = ()
    group: int = 1

    @property
    def tokens(self) -> Lengths:
        """The numbers of tokens in the smaller and in the larger call."""
        small, large = self.entries
        return small * self.group, large * self.group

    def token_dims(self, small: TensorRecord, large: TensorRecord) -> list[int]:
        """Return the dims that are as long as the tokens, or as the entries, in both calls."""
        known = (self.tokens, self.entries)
        return [dim for dim, lengths in grown_dims(small, large).items() if lengths in known]


def grown_dims(small: TensorRecord, large: TensorRecord) -> dict[int, Lengths]:
    """Return the dims whose lengths differ, each with both lengths. Empty if the numbers of dims differ."""
    if len(small.shape) != len(large.shape):
        return {}
    pairs = zip(small.shape, large.shape, strict=True)
    return {dim: lengths for dim, lengths in enumerate(pairs) if lengths[0] != lengths[1]}


def find_starts(small: ObservedCall, large: ObservedCall) -> Iterator[Start]:
    """Yield the possible starts in the order of time: first block lists, then modules that contain blocks."""
    for name in small.list_names():
        calls, larger_calls = small.calls_in_list(name), large.calls_in_list(name)
        if larger_calls and small.attends(calls):
            yield from _starts_at(calls[0], larger_calls[0], streams_of(calls))
    outer = [call for call in small.calls if call.block_list is None and small.attends([call])]
    for call in sorted(outer, key=lambda call: call.began):
        larger_call = next((other for other in large.calls if other.name == call.name), None)
        if larger_call is not None:
            yield from _starts_at(call, larger_call, _sequences(call))


def _sequences(call: ModuleCall) -> list[str]:
    """Return the parameters that are ``[B, S, C]``: floats, because tokens are features, and ids are not."""
    return [
        parameter
        for parameter, value in call.arguments.items()
        if isinstance(value, TensorRecord) and value.dtype.is_floating_point and len(value.shape) == 3
    ]


def _starts_at(call: ModuleCall, larger_call: ModuleCall, streams: Iterable[str]) -> Iterator[Start]:
    """Yield the starts at ``call``: with the tokens of an entry together if there are such dims, and without."""
    growing = [stream for name in streams for stream in _growing_streams(name, call, larger_call)]
    if not growing:
        return
    # If several parameters grow differently, choose hidden_states, which in diffusers holds the image tokens.
    chosen = next((stream for stream in growing if stream.name == "hidden_states"), growing[0])
    names = [
        stream.name for stream in growing if (stream.dim, stream.lengths) == (chosen.dim, chosen.lengths)
    ]
    shape, dim = call.arguments[chosen.name].shape, chosen.dim
    together = tuple(range(dim + 1, len(shape) - 1))
    if together:
        group = prod(shape[dim + 1 : -1])
        yield Start(call.name, chosen.lengths, tuple(names), dim, together, group)
    yield Start(call.name, chosen.lengths, tuple(names), dim)


@dataclass(frozen=True)
class _GrowingStream:
    """A parameter that grows along one dim, with its lengths in both calls."""

    name: str
    dim: int
    lengths: Lengths


def _growing_streams(name: str, call: ModuleCall, larger_call: ModuleCall) -> Iterator[_GrowingStream]:
    """Yield the parameter ``name`` if it is a tensor of which exactly one dim grows."""
    record, larger = call.arguments.get(name), larger_call.arguments.get(name)
    if not isinstance(record, TensorRecord) or not isinstance(larger, TensorRecord):
        return
    dims = grown_dims(record, larger)
    if len(dims) == 1:
        for dim, lengths in dims.items():
            yield _GrowingStream(name, dim, lengths)


def streams_of(calls: list[ModuleCall]) -> tuple[str, ...]:
    """Return the parameters of the first block of ``calls`` whose updated values it returns, in that order.

    An output belongs to the parameter through which the next block receives it, or else to one of the same
    shape that the next block does not get unchanged. An output that belongs to no parameter gives ``""``.
    Fields of a dataclass that the block returns unchanged are left out.
    """
    inputs = {name: value for name, value in calls[0].arguments.items() if isinstance(value, TensorRecord)}
    following: Mapping[str, Any] = {}
    if len(calls) > 1:
        following = calls[1].arguments
    passed_on = {record.identity for name, record in inputs.items() if "." in name}
    streams: list[str] = []
    for output in tensors_of(calls[0].output):
        if output.identity in passed_on:
            continue
        received = [name for name, value in following.items() if _identity_of(value) == output.identity]
        same_shape = [
            name
            for name, record in inputs.items()
            if record.shape == output.shape
            and name not in streams
            and _identity_of(following.get(name)) != record.identity
        ]
        streams.append((received or same_shape or [""])[0])
    return tuple(streams)


def _identity_of(value: Any) -> int | None:
    return getattr(value, "identity", None)
