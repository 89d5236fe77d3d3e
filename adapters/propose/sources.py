"""Track from which arguments each tensor of a model call was computed.

Only ``observe.py`` uses it. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.dataclass_fields import leaves_of

# Marks a tensor as derived, among the names of the model arguments from which it was computed.
_DERIVED = ""

Source = str | int


class Sources:
    """For each tensor of a call, what it was computed from: arguments of the model, by name, and softmaxes,
    by index.

    Tensors that were marked, and those computed from them, are derived. The observer of the call sets the
    sources of each output from those of the operands; this class follows no operator itself.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._sources = WeakTensorKeyDictionary()
        for name, value in inputs.items():
            self.set(value, frozenset([name]))

    def set(self, value: Any, sources: frozenset[Source]) -> None:
        """Set the sources of the tensors in ``value``. With no ``sources``, they keep theirs."""
        if not sources:
            return
        for x in leaves_of(value):
            if isinstance(x, Tensor):
                self._sources[x] = sources

    def mark(self, value: Any, sources: frozenset[Source]) -> None:
        """Set the sources of the tensors in ``value``, and mark them."""
        self.set(value, sources | {_DERIVED})

    def sources_of(self, tensors: Iterable[Tensor]) -> frozenset[Source]:
        """Return the sources of all ``tensors``."""
        return frozenset().union(*[self._sources.get(x, frozenset()) for x in tensors])

    def is_derived(self, *tensors: Tensor) -> bool:
        """Whether one of ``tensors`` is derived."""
        return _DERIVED in self.sources_of(tensors)

    def arguments_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Return the names of the arguments of the model from which ``tensors`` were computed."""
        return frozenset(
            name for name in self.sources_of(tensors) if isinstance(name, str) and name != _DERIVED
        )
