"""Count launches, bytes and memory from the operators of a recorded call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from para_core.recorder.events import OperatorCall
from para_core.torch_internals import OpOverload, pytree, schema_of, storage_id

# These operators launch nothing on a device, although they are not views: allocations and a reshape.
_ALLOCATIONS = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_NO_LAUNCH = {f"aten::{name}" for name in ("_unsafe_view", *_ALLOCATIONS)}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::linear"}


class OperatorCount:
    """The number of launches in a recorded call, the bytes that they read and write, and the peak bytes of
    tensors.

    Attributes:
        launches: Number of launches. Operators inside attention are left out.
        moved: Bytes that launches outside of attention read and write, other than matrix products and
            convolutions: the bytes while ``is_sharded`` was True, and those while it was False.
        peak: The bytes of tensors of the call when their sum was largest, inside attention too: those made
            while ``is_sharded`` was True, and the others.
        is_sharded: Whether the operators that follow work on sharded tokens. The caller sets it.
        in_attention: Whether the operators that follow compute an attention call. The caller sets it.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.moved = [0, 0]
        self.peak = [0, 0]
        self.is_sharded = self.in_attention = False
        self._in_memory = [0, 0]
        self._storages: set[int] = set()

    def note(self, event: OperatorCall) -> None:
        """Count the operator of ``event``."""
        operands, results = leaf_tensors((event.args, event.kwargs)), leaf_tensors(event.output)
        index = int(not self.is_sharded)
        self._note_memory(results, {storage_id(x.untyped_storage()) for x in operands}, index)
        if self.in_attention or not is_launch(event.operator):
            return
        self.launches += 1
        if schema_of(event.operator).name not in _PRODUCTS:
            self.moved[index] += sum(_bytes_in_memory(x) for x in (*operands, *results))

    def _note_memory(self, results: Sequence[Tensor], operands: set[int], index: int) -> None:
        for x in results:
            storage = x.untyped_storage()
            # A result in the storage of an operand is a view, or was written in place.
            key = storage_id(storage)
            if key not in self._storages and key not in operands:
                self._storages.add(key)
                weakref.finalize(storage, self._free, key, storage.nbytes(), index)
                self._in_memory[index] += storage.nbytes()
        if sum(self._in_memory) > sum(self.peak):
            self.peak = list(self._in_memory)

    def _free(self, key: int, size: int, index: int) -> None:
        self._storages.discard(key)
        self._in_memory[index] -= size


def _bytes_in_memory(x: Tensor) -> int:
    # An expanded tensor covers fewer bytes of memory than its ``nbytes``.
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def leaf_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and other containers of torch's pytree, in order."""
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def is_launch(operator: OpOverload) -> bool:
    """Whether ``operator`` launches work on a device: it is neither a view nor an allocation."""
    return (
        schema_of(operator).name not in _NO_LAUNCH and operator.namespace != "prim" and not _is_view(operator)
    )


def _is_view(operator: OpOverload) -> bool:
    """Whether ``operator`` returns a view of an argument; False in place, where it returns what it writes."""
    aliases = [returned.alias_info for returned in schema_of(operator).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
