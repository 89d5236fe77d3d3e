"""Find the modules at which tokens may be sharded first: those whose inputs grow from a smaller to a larger call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from para_core.adapters.propose.observe import ModuleCall, ObservedCall, TensorRecord, tensors_of

# A length in the smaller call, and the same length in the larger call.
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Start:
    """A module at whose inputs tokens may be sharded: the first block of a list, or a module that contains all blocks.

    ``tokens`` are their numbers in the smaller and in the larger call, and ``streams`` the parameters of the module
    that hold them, along ``dim``.
    """

    block: str
    tokens: Lengths
    streams: tuple[str, ...]
    dim: int

    def token_dims(self, small: TensorRecord, large: TensorRecord) -> list[int]:
        """Return the dims that are as long as the tokens in both calls."""
        return [dim for dim, lengths in grown_dims(small, large).items() if lengths == self.tokens]


def grown_dims(small: TensorRecord, large: TensorRecord) -> dict[int, Lengths]:
    """Return the dims whose lengths differ, each with both lengths. Empty if the numbers of dims differ."""
    if len(small.shape) != len(large.shape):
        return {}
    pairs = zip(small.shape, large.shape, strict=True)
    return {dim: lengths for dim, lengths in enumerate(pairs) if lengths[0] != lengths[1]}


def streams_of(calls: list[ModuleCall]) -> tuple[str, ...]:
    """Return the parameters of the first block of ``calls`` whose updated values it returns, in that order.

    An output belongs to the parameter through which the next block receives it. If the next block does not receive it,
    it belongs to a parameter of the same shape, unless the next block gets that parameter unchanged. An output that
    belongs to no parameter gives ``""``.
    """
    inputs = {name: value for name, value in calls[0].arguments.items() if isinstance(value, TensorRecord)}
    following = calls[1].arguments if len(calls) > 1 else {}
    streams: list[str] = []
    for output in tensors_of(calls[0].output):
        received = [name for name, value in following.items() if getattr(value, "identity", None) == output.identity]
        same_shape = [
            name
            for name, record in inputs.items()
            if record.shape == output.shape
            and name not in streams
            and getattr(following.get(name), "identity", None) != record.identity
        ]
        streams.append((received or same_shape or [""])[0])
    return tuple(streams)


def starts(small: ObservedCall, large: ObservedCall) -> Iterator[Start]:
    """Yield the possible starts in the order of time. A later start leaves more of the model replicated.

    Modules that contain blocks come after all block lists.
    """
    for name in dict.fromkeys(call.block_list for call in small.calls if call.block_list is not None):
        calls, larger_calls = small.of_list(name), large.of_list(name)
        if larger_calls and small.attends(calls[0].began, calls[-1].ended):
            yield from _start(calls[0], larger_calls[0], streams_of(calls))
    outer = [call for call in small.calls if call.block_list is None and small.attends(call.began, call.ended)]
    for call in sorted(outer, key=lambda call: call.began):
        larger_call = next((other for other in large.calls if other.name == call.name), None)
        sequences = [
            parameter
            for parameter, value in call.arguments.items()
            if isinstance(value, TensorRecord) and value.dtype.is_floating_point and len(value.shape) == 3
        ]
        if larger_call is not None:
            yield from _start(call, larger_call, sequences)


def _start(call: ModuleCall, larger_call: ModuleCall, streams: Iterable[str]) -> Iterator[Start]:
    growing: list[tuple[str, int, Lengths]] = []
    for stream in streams:
        record, larger = call.arguments.get(stream), larger_call.arguments.get(stream)
        if isinstance(record, TensorRecord) and isinstance(larger, TensorRecord):
            dims = grown_dims(record, larger)
            growing += [(stream, dim, lengths) for dim, lengths in dims.items() if len(dims) == 1]
    if growing:
        # If several parameters grow differently, choose hidden_states, which in diffusers holds the image tokens.
        _, dim, tokens = next((entry for entry in growing if entry[0] == "hidden_states"), growing[0])
        yield Start(call.name, tokens, tuple(entry[0] for entry in growing if entry[1:] == (dim, tokens)), dim)
