"""The findings of the check of a call about its functions, for later calls of the same sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.utils.weak import WeakTensorKeyDictionary

from para_core.same_bits.at_place import CallKind, TorchCall
from para_core.same_bits.one_process import UNKNOWN, Sequences


@dataclass(eq=False)
class Found:
    """The findings of one check, for calls with these sizes of the inputs.

    Args:
        at_place: The kinds of functions that have other bits on this rank, and are computed at the place of
            its rows in one process.
    """

    at_place: set[CallKind] = field(default_factory=set)
    # The sequences whose tokens functions get, by kind: several, if it gets those of several.
    _sequences: dict[CallKind, set[Sequences]] = field(default_factory=dict)
    # The same by the weight of linear products.
    _sequences_for: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def note(self, call: TorchCall, sequences: Sequences) -> None:
        """Note the sequences whose tokens a function gets."""
        self._sequences.setdefault(call.kind, set()).add(sequences)
        if call.weight is not None:
            self._sequences_for.setdefault(call.weight, {}).setdefault(call.kind, set()).add(sequences)

    def sequences_of(self, call: TorchCall) -> Sequences:
        """Return the sequences whose tokens a function gets; UNKNOWN if it was not seen, or gets several."""
        noted = self._noted_for(call)
        return next(iter(noted)) if len(noted) == 1 else UNKNOWN

    def gets_several(self, call: TorchCall) -> bool:
        """Whether a function gets tokens of several sequences in tensors of equal sizes, so that a later call
        cannot tell which these are.
        """
        return len(self._noted_for(call)) > 1

    def _noted_for(self, call: TorchCall) -> set[Sequences]:
        """Return the sequences of a kind, or if these are several, those of the weight of a linear product."""
        noted = self._sequences.get(call.kind, set())
        if len(noted) < 2 or call.weight is None:
            return noted
        of_weight: set[Sequences] = self._sequences_for.get(call.weight, {}).get(call.kind, set())
        return of_weight
