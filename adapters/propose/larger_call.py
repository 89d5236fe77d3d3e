"""Imagine a call with one more token, for a model that accepts one size only.

``propose.py`` uses these calls in place of the observed second example. The model does not run here. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from para_core.adapters.propose.records import BlockMaskRecord, ObservedCall, TensorRecord, tensors_of
from para_core.torch_internals import tree_map


def imagine_larger_calls(observed: ObservedCall) -> Iterator[ObservedCall]:
    """Yield copies of ``observed`` with one more token, one or two for each length that may be the number of
    tokens.

    Sizes that equal that length, or that length plus the length of another tensor that a block receives (such
    as text), grow. If the last dim of a float tensor is among them, it may also hold as many channels as there
    are tokens: the second copy does not change it. The check of the resulting plan on virtual ranks confirms or
    refutes this.
    """
    lengths = _lengths_of_arguments(observed)
    for length in lengths:
        others = frozenset(lengths) - {length}
        growth = _Growth(length, others, keeps_channels=False)
        if not any(growth.grows(call.queries) or growth.grows(call.keys) for call in observed.attention):
            continue
        larger = growth.imagine(observed)
        yield larger
        with_channels = replace(growth, keeps_channels=True).imagine(observed)
        if with_channels != larger:
            yield with_channels


def _lengths_of_arguments(observed: ObservedCall) -> list[int]:
    """Return the lengths of the tokens ``[B, S, C]`` that modules receive, without repetitions."""
    records = [record for call in observed.calls for record in tensors_of(dict(call.arguments))]
    tokens = [record for record in records if len(record.shape) == 3 and record.dtype.is_floating_point]
    return [*dict.fromkeys(record.shape[1] for record in tokens)]


@dataclass(frozen=True)
class _Growth:
    """One more token in a sequence of ``length`` tokens.

    Args:
        length: Number of tokens.
        others: The other lengths of tensors that modules receive. A size that is ``length`` plus one of them
            is that of a joint sequence, and grows too. Twice ``length`` does not: a time embedding often has
            that size, and text of ``length`` tokens would grow with them.
        keeps_channels: Whether the last dim of a float tensor with several dims is never changed.
    """

    length: int
    others: frozenset[int]
    keeps_channels: bool

    def grows(self, size: int) -> bool:
        """Whether a dim of ``size`` has one more entry in the larger call."""
        return size == self.length or size - self.length in self.others

    def grow(self, size: int) -> int:
        """Return the size of a dim of ``size`` in the larger call."""
        return size + self.grows(size)

    def imagine(self, observed: ObservedCall) -> ObservedCall:
        """Return the larger call."""
        calls = [
            replace(
                call,
                arguments=tree_map(self._imagine_value, call.arguments),
                output=tree_map(self._imagine_value, call.output),
            )
            for call in observed.calls
        ]
        attention = [
            replace(call, queries=self.grow(call.queries), keys=self.grow(call.keys))
            for call in observed.attention
        ]
        inputs = tree_map(self._imagine_value, observed.inputs)
        return replace(observed, inputs=inputs, calls=calls, attention=attention)

    def _imagine_value(self, value: Any) -> Any:
        """Return a record, or an argument that is no tensor, as it is in the larger call."""
        if isinstance(value, BlockMaskRecord):
            queries, keys = value.lengths
            return replace(value, lengths=(self.grow(queries), self.grow(keys)))
        if isinstance(value, TensorRecord):
            values = tuple([self._grow_number(number) for number in value.values])
            return replace(value, shape=self._grow_shape(value), values=values)
        if type(value) is int:
            return self._grow_number(value)
        return value

    def _grow_number(self, number: int) -> int:
        """Return an integer of the call as it is in the larger one.

        That of a joint sequence stays, unlike a size, because no rule of a plan changes such a number.
        """
        return number + (number == self.length)

    def _grow_shape(self, record: TensorRecord) -> tuple[int, ...]:
        shape, num_dims = record.shape, len(record.shape)
        # Do not change the last dim of [B, S, C]: it holds channels, even if there are as many as tokens.
        is_sequence = num_dims == 3 and self.length in shape[:2]
        if record.dtype.is_floating_point and num_dims > 1 and (is_sequence or self.keeps_channels):
            num_dims -= 1
        return (*[self.grow(size) for size in shape[:num_dims]], *shape[num_dims:])
