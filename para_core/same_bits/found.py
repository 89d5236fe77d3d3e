"""The findings of the check of a call about its functions, for later calls of the same sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.same_bits.at_place import Kind
from para_core.same_bits.one_process import UNKNOWN, Sequences


@dataclass(eq=False)
class Found:
    """The findings of one check, for calls with these sizes of the inputs.

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
