"""What the check of a call finds out about its functions, for later calls of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.same_bits.one_process import UNKNOWN, Sequences

# A function, with what its bits may depend on.
Kind = tuple[Any, ...]


def kind_of(func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Kind:
    """Return what the bits of ``func(x, *args, **kwargs)`` may depend on, besides the elements of the tensors."""
    others = [*args, *[value for _, value in sorted(kwargs.items())]]
    # Another dim or stride of a convolution is another function.
    return (func, x.shape, x.stride(), x.dtype, tuple(sorted(kwargs)), *map(_as_key, others))


def _as_key(argument: Any) -> Any:
    """Return the shape of a tensor, or the text of another argument."""
    if isinstance(argument, Tensor):
        return argument.shape
    return repr(argument)


@dataclass(eq=False)
class Found:
    """What the check found about the functions of a call, with certain sizes of its inputs.

    Args:
        at_place: The kinds of functions that have other bits on this rank, and are computed at the place of its
            rows in one process.
    """

    at_place: set[Kind] = field(default_factory=set)
    # The sequences whose tokens functions get, by kind: several, if it gets those of several.
    _sequences: dict[Kind, set[Sequences]] = field(default_factory=dict)
    # The same by the weight of linear products.
    _sequences_for: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def note(self, kind: Kind, weight: Tensor | None, sequences: Sequences) -> None:
        """Note the sequences whose tokens a function gets. ``weight`` is that of a linear product."""
        self._sequences.setdefault(kind, set()).add(sequences)
        if weight is not None:
            self._sequences_for.setdefault(weight, {}).setdefault(kind, set()).add(sequences)

    def sequences_of(self, kind: Kind, weight: Tensor | None) -> Sequences:
        """Return the sequences whose tokens a function gets; UNKNOWN if it was not seen, or gets several."""
        noted = self._sequences.get(kind, set())
        if len(noted) > 1 and weight is not None:
            noted = self._sequences_for.get(weight, {}).get(kind, set())
        if len(noted) != 1:
            return UNKNOWN
        return next(iter(noted))

    @property
    def unclear(self) -> list[Kind]:
        """The kinds of :attr:`at_place` that get tokens of several sequences, and have no weight to tell these."""
        return [
            kind
            for kind in self.at_place
            if len(self._sequences.get(kind, ())) > 1 and kind[0] is not F.linear
        ]
