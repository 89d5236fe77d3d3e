"""Count launches, matrix products, bytes and memory from the operators of a recorded call.

The planner counts a call by this, inside ``without_data`` of ``adapters/planner/count.py`` (``torch.no_grad``). In
``torch.inference_mode`` torch passes composite operators whole to a dispatch mode: a linear layer then is no
matrix product, and ``to``, which may return its argument, no launch. What a real run sends and launches is
counted by :mod:`.run_counter`, for which the same holds. Tests: tests/recorder/test_recorder.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.recorder.events import OperatorCall
from para_core.torch_internals import OpOverload, pytree, schema_of, storage_id

# These operators launch nothing on a device, although they are not views.
_ALLOCATIONS = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_NO_LAUNCH = {
    *(f"aten::{name}" for name in _ALLOCATIONS),
    "aten::_unsafe_view",
    "aten::_fused_sdp_choice",  # chooses a kernel
    "aten::_local_scalar_dense",  # copies a number to the host
    "_c10d_functional::wait_tensor",  # makes the stream wait
}
# Matrix products, each with the position of its first factor ``[..., n, k]``. Linear layers, einsum and
# matmul become these. Products with a vector (mv, dot) count as bytes, which bound them. There are none of 8
# bits, because the planner counts a model with plain weights.
_MATRIX_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}


class OperatorCount:
    """The number of launches in a recorded call, the bytes that they read and write, and the peak bytes of
    tensors.

    Attributes:
        launches: Number of launches. Operators inside attention are left out.
        products: Floating-point operations of matrix products and convolutions outside of attention.
        moved: Bytes that all other launches outside of attention read and write.
        peak: The bytes of tensors of the call when their sum was largest, inside attention too: first of
            those that were made while ``is_sharded`` was True, then of the others. A tensor counts until it
            is freed, so it counts for too long if the caller keeps its event.
        is_sharded: Whether the operators that follow work on sharded tokens. The caller sets it before them.
        in_attention: Whether the operators that follow compute an attention call. The caller sets it.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.products = 0.0
        self.moved = 0
        self.peak = [0, 0]
        self.is_sharded = self.in_attention = False
        self._in_memory = [0, 0]
        self._storages: set[int] = set()

    def note(self, event: OperatorCall) -> None:
        """Count the operator of ``event``."""
        operands, results = leaf_tensors((event.args, event.kwargs)), leaf_tensors(event.output)
        self._note_memory(results, {storage_id(x.untyped_storage()) for x in operands})
        if self.in_attention or not is_launch(event.operator):
            return
        self.launches += 1
        operations = operations_of_product(event)
        if operations is None:
            self.moved += sum(_bytes_in_memory(x) for x in (*operands, *results))
        else:
            self.products += operations

    def _note_memory(self, results: Sequence[Tensor], operands: set[int]) -> None:
        """Count the storages of ``results`` that are new, until they are freed, by whether the tokens are sharded now.

        ``operands`` are the ids of the operands' storages.
        """
        index = int(not self.is_sharded)
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


def operations_of_product(event: OperatorCall) -> float | None:
    """Return the floating-point operations of a matrix product or convolution: two for each multiplication.
    None for other operators.
    """
    name = schema_of(event.operator).name
    if name in _MATRIX_PRODUCTS:
        factor: Tensor = event.args[_MATRIX_PRODUCTS[name]]
        output: Tensor = event.output
        return 2.0 * output.numel() * factor.shape[-1]
    if name == "aten::convolution":
        weight: Tensor = event.args[1]
        # weight[0] makes one entry of the output, or if transposed, it is multiplied by one entry of the
        # input.
        entries: Tensor = event.output
        is_transposed: bool = event.args[6]
        if is_transposed:
            entries = event.args[0]
        return 2.0 * entries.numel() * weight[0].numel()
    return None


def _bytes_in_memory(x: Tensor) -> int:
    # An expanded tensor covers fewer bytes of memory than its ``nbytes``.
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def leaf_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and other containers of torch's pytree, in order."""
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def is_launch(operator: OpOverload) -> bool:
    """Whether ``operator`` launches a kernel on a device: it is neither a view, an allocation nor a wait."""
    return (
        schema_of(operator).name not in _NO_LAUNCH and operator.namespace != "prim" and not _is_view(operator)
    )


def _is_view(operator: OpOverload) -> bool:
    """Whether ``operator`` returns a view of an argument, or makes its argument one in place, such as ``t_``.
    False for other operators in place, which return what they write.
    """
    if torch.Tag.inplace_view in operator.tags:
        return True
    aliases = [returned.alias_info for returned in schema_of(operator).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
