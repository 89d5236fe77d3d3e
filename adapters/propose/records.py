"""The record of an observed model call: its tensors by shape, the calls of its modules, and its attention
calls.

``observe.py`` makes it, and every guess of this room reads it. A time is a number of the recorder, which
grows with each event of one call of the model. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class TensorRecord:
    """Record of a tensor.

    Args:
        shape, dtype: Those of the tensor.
        identity: A number that no other tensor of the call has.
        derived: Whether the tensor was computed from a marked one (``streams`` of :func:`observe`).
        values: The values of two integers, which may be the cumulative lengths of a sequence; else empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    derived: bool
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class BlockMaskRecord:
    """Record of a flex-attention ``BlockMask``: its numbers of queries and keys.

    The rest is as in a TensorRecord.
    """

    lengths: tuple[int, int]
    identity: int
    derived: bool


def tensors_of(value: Any) -> list[TensorRecord]:
    """Return the tensor records in nested lists, tuples and mappings, in order."""
    if isinstance(value, TensorRecord):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [record for item in value for record in tensors_of(item)]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor in the output of a module.

    Args:
        index: The index of the entry of the output in which it is.
        path: The path of its field, if the entry is a dataclass; else ``""``.
        record: Its record.
    """

    index: int
    path: str
    record: TensorRecord


def output_tensors(output: Any) -> list[OutputTensor]:
    """Return the tensors of a module's output.

    Those in a list inside of it are left out: a plan cannot name them.
    """
    if isinstance(output, Mapping):
        output = list(output.values())
    if not isinstance(output, (list, tuple)):
        output = [output]
    return [tensor for index, entry in enumerate(output) for tensor in _tensors_of_entry(entry, index, ())]


def _tensors_of_entry(value: Any, index: int, path: tuple[str, ...]) -> Iterator[OutputTensor]:
    if isinstance(value, TensorRecord):
        yield OutputTensor(index, ".".join(path), value)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _tensors_of_entry(entry, index, (*path, str(name)))


@dataclass(frozen=True)
class ModuleCall:
    """A call of a block, of a direct submodule of the model, or of a module outside the blocks that calls
    attention.

    Args:
        name: Name of the module.
        block_list: Name of the container that holds the block, or None.
        began, ended: Times of the call, as those of :class:`ObservedAttention`.
        arguments: By name. They have a :class:`TensorRecord` for each tensor, and a :class:`BlockMaskRecord` for
            each ``BlockMask``. A field of a dataclass is an argument of its own, named by its path.
        output: The output, likewise. A dataclass is a dict of its fields; one that is the whole output is the
            only entry of a list, as an output of several entries would have it.
    """

    name: str
    block_list: str | None
    began: int
    ended: int
    arguments: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class ObservedAttention:
    """An attention call in module ``name``: its time, number of queries and keys, and the mask's shape.

    A call of flex_attention is recorded without a mask, because a plan shards a ``BlockMask`` as an argument.
    """

    name: str
    time: int
    queries: int
    keys: int
    mask: tuple[int, ...] | None


@dataclass(frozen=True)
class ObservedSoftmax:
    """A softmax of a tensor of ``shape``, with 3 or more dims, in module ``name``, as handwritten attention
    has it.

    ``derived`` is that of its input. ``is_used`` says whether the output of the model was computed from it.
    """

    name: str
    time: int
    shape: tuple[int, ...]
    derived: bool
    is_used: bool = False


@dataclass
class ObservedCall:
    """Record of one call of a model, in the order of time.

    Args:
        inputs: The arguments of the call, as in :class:`ModuleCall`.
        calls: The recorded calls of submodules, by their ends.
        attention, softmaxes: The attention calls, and the softmaxes outside of attention.
        joined_inputs: The arguments that the model itself, outside of submodules, combines with derived
            tensors.
        sources: The arguments from which the marked tensors were computed.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[ObservedAttention] = field(default_factory=list)
    joined_inputs: set[str] = field(default_factory=set)
    softmaxes: list[ObservedSoftmax] = field(default_factory=list)
    sources: frozenset[str] = frozenset()

    def calls_in_list(self, name: str) -> list[ModuleCall]:
        """Return the calls of the blocks in the container ``name``."""
        return [call for call in self.calls if call.block_list == name]

    def list_names(self) -> list[str]:
        """Return the names of the containers whose blocks were called, in the order of time."""
        return [*dict.fromkeys(call.block_list for call in self.calls if call.block_list is not None)]

    def attends(self, calls: Sequence[ModuleCall]) -> bool:
        """Whether attention was called between the beginning of the first and the end of the last of
        ``calls``.
        """
        began, ended = calls[0].began, calls[-1].ended
        return any(began < attention.time < ended for attention in self.attention)
