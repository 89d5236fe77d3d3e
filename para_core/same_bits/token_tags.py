"""Follow the tokens of this rank through a call: which tensors hold tokens of which sequences.

Sizes do not tell: a text may have as many tokens on every rank as an image has on this one. The plan says
which tensors it cut, and a recorder reports each function: what it returns holds the tokens of its arguments,
or a part of them. Where that is unclear, the sequences are unknown. A tensor into which no tokens went has
all rows.

Used only during a check: :mod:`.call` feeds it with what the plan cut and with each function. Tests:
tests/same_bits/test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.recorder.events import Event, FunctionCall
from para_core.same_bits.one_process import UNKNOWN, Names, OneProcess, Sequences, token_dims
from para_core.torch_internals import scaled_dot_product_attention, tree_leaves


class TokenTags:
    """The sequences whose tokens each tensor of a call holds.

    Args:
        one_process: Returns what one process would compute in place of the call.
    """

    def __init__(self, one_process: Callable[[], OneProcess]) -> None:
        self._one_process = one_process
        self._tags = WeakTensorKeyDictionary()

    def add(self, x: Tensor, sequences: Names) -> None:
        """Note that ``x`` holds this rank's tokens of these sequences, in this order."""
        self._tags[x] = sequences

    def sequences_of(self, x: Tensor) -> Sequences:
        """Return the sequences whose tokens ``x`` holds; None if it holds none."""
        tag: Sequences = self._tags.get(x)
        return tag

    def follow(self, event: Event) -> None:
        """Note the outputs of a function that got tokens."""
        if not isinstance(event, FunctionCall):
            return
        arguments = list(_tensors_in((event.args, event.kwargs)))
        if any(x in self._tags for x in arguments):
            for y in _tensors_in(event.output):
                sequences = self._sequences_of_output(event.function, arguments, y)
                if sequences != UNKNOWN and not any(isinstance(name, str) for name in sequences):
                    # These are rows that every rank has, such as a text after attention together with an image.
                    self._tags.pop(y, None)
                else:
                    self._tags[y] = sequences

    def _sequences_of_output(
        self, function: Callable[..., Any], arguments: Sequence[Tensor], y: Tensor
    ) -> Names:
        """Return the sequences of ``y``, which ``function`` returned for ``arguments``, some of which hold
        tokens.
        """
        if function is scaled_dot_product_attention:
            # Its rows are those of the query.
            arguments = arguments[:1]
        tags = [tag for x in arguments if (tag := self._tags.get(x)) is not None]
        if function in (torch.cat, torch.concat, torch.concatenate) and UNKNOWN not in tags:
            joined = self._join(arguments, y)
            if joined is not None:
                return joined
        # A view comes before what has a fitting size: its features may be as many as the tokens of its base.
        if len(arguments) == len(tags) == 1:
            part = self._sequences_of_part(arguments[0], tags[0], y)
            if part != UNKNOWN:
                return part
        fitting: set[Names] = {tag for tag in tags if tag and self._has_size(y, tag)}
        if len(fitting) == 1:
            return fitting.pop()
        return UNKNOWN

    def _join(self, arguments: Sequence[Tensor], y: Tensor) -> Names | None:
        """Return the sequences of ``y``, the concatenation of ``arguments``; None if these are features."""
        if any(x.ndim != y.ndim for x in arguments):
            return None
        dims = [dim for dim in range(y.ndim) if sum(x.shape[dim] for x in arguments) == y.shape[dim]]
        if len(dims) != 1:
            return None
        joined = tuple([name for x in arguments for name in self._tags.get(x, (x.shape[dims[0]],))])
        if self._one_process().count_tokens(joined) != y.shape[dims[0]]:
            return None
        return joined

    def _has_size(self, x: Tensor, sequences: Names) -> bool:
        """Whether a dim of ``x`` has as many entries as this rank has tokens of ``sequences``."""
        return self._one_process().count_tokens(sequences) in x.shape

    def _sequences_of_part(self, x: Tensor, sequences: Names, y: Tensor) -> Names:
        """Return the sequences of ``y`` if it is a view of some of the ``sequences`` that ``x`` holds; else
        UNKNOWN.
        """
        size = self._one_process().count_tokens(sequences)
        dims = [dim for dim in token_dims(x) if x.shape[dim] == size]
        if (
            x.ndim != y.ndim
            or len(dims) != 1
            or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        ):
            return UNKNOWN
        dim = dims[0]
        if x.stride(dim) != y.stride(dim):
            return UNKNOWN
        start, rest = divmod(int(y.storage_offset() - x.storage_offset()), max(1, x.stride(dim)))
        end = start + y.shape[dim]
        starts = [
            self._one_process().count_tokens(sequences[:number]) for number in range(len(sequences) + 1)
        ]
        if rest or start not in starts or end not in starts:
            return UNKNOWN
        return sequences[starts.index(start) : starts.index(end)]


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))
