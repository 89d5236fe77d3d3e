"""Compute functions of one row at the place of a rank's rows in zeros of one process's sizes, where bits
differ else.

A CPU computes the last few elements of a tensor by another function than the rest, and chooses the kernel of
a product or a convolution by sizes. The same function of the same rows at the same place in a tensor of the
same sizes has the bits of one process, whatever the other rows are.

The rules of :mod:`.image_rows` call this. Tests: tests/same_bits/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.same_bits.at_place import is_dense, resize
from para_core.same_bits.products import have_equal_bytes
from para_core.spatial.fetch import part_of, put_part
from para_core.spatial.row_tag import RowTag, rows_of, set_rows
from para_core.torch_functions import Function, name_of

# A new kind of function is compared on so many orders of its elements, as few elements may happen to be
# equal.
_ORDERS = 8
# Tensors of more elements are compared in fewer orders.
_COMPARED_ELEMENTS = 1 << 17
# A CPU computes elements in vectors of this number at most, and the rest of a tensor by another function.
# Results for these few elements are equal for most values, so that a comparison may miss them.
VECTOR = 64


class Known(NamedTuple):
    """A finding about one kind of function.

    Args:
        differs: Whether a rank's rows have other bits than in one process.
        rows: The tag of the output; None if it has no rows.
    """

    differs: bool
    rows: RowTag | None


@dataclass(eq=False)
class PlacedRows:
    """The kinds of functions that were compared with one process so far.

    A kind is a function with the sizes, types and layouts of its arguments.
    """

    _known: dict[tuple[Any, ...], Known] = field(default_factory=dict)

    def run(
        self,
        kind: tuple[Any, ...],
        tensors: Sequence[Tensor],
        compute: Callable[[Sequence[Tensor]], Any],
        compute_at_place: Callable[[Sequence[Tensor], RowTag], Tensor],
    ) -> Any:
        """Return a rank's rows of a function with the bits of one process. No collective.

        Args:
            kind: The function, and what its bits may depend on.
            tensors: The tensors with rows.
            compute: Returns the function of such tensors.
            compute_at_place: Returns this rank's part, with the given tag, of the function in one process.
                Both write to the first tensor, and return it, if the function is one in place.
        """
        known = self._known.get(kind)
        if known is None:
            known = _compare(tensors, compute, compute_at_place)
            self._known[kind] = known
        if known.differs and known.rows is not None:
            return set_rows(compute_at_place(tensors, known.rows), known.rows)
        return compute(tensors)


def _compare(
    tensors: Sequence[Tensor],
    compute: Callable[[Sequence[Tensor]], Any],
    compute_at_place: Callable[[Sequence[Tensor], RowTag], Tensor],
) -> Known:
    """Return whether the two functions have other bytes, for the elements of ``tensors`` in several orders."""
    rows = None
    elements = max(1, sum(x.numel() for x in tensors))
    for order in range(max(1, min(_ORDERS, _COMPARED_ELEMENTS // elements))):
        output = compute([_roll(x, order) for x in tensors])
        rows = rows_of(output)
        if rows is None:
            return Known(False, None)
        if has_rest(output, rows):
            return Known(True, rows)
        expected = compute_at_place([_roll(x, order) for x in tensors], rows)
        if output.shape != expected.shape or not have_equal_bytes(expected, output):
            return Known(True, rows)
    return Known(False, rows)


def has_rest(x: Tensor, rows: RowTag) -> bool:
    """Whether a CPU computes elements of ``x``, on a rank or in one process, other than in vectors."""
    if x.device.type != "cpu":
        return False
    numbers = [x.shape[rows.dim], rows.total]
    row_size = x.numel() // max(1, x.shape[rows.dim])
    # The loops over a tensor with gaps are shorter, and each may have a rest.
    return any(number * row_size % VECTOR for number in numbers) or not is_dense(x)


def _roll(x: Tensor, order: int) -> Tensor:
    """Return a copy of ``x`` with its elements moved on, with its tag, and its order of dims in memory."""
    rows = rows_of(x)
    copy = resize(x, x.shape)
    # An odd number, so that in each of the _ORDERS an element is at another place of its vector.
    copy.copy_(x.reshape(-1).roll(order * 13).view(x.shape))
    if rows is None:
        return copy
    return set_rows(copy, rows)


def place(x: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Return zeros of one process's sizes with this rank's rows ``x`` at their place."""
    sizes = [*x.shape]
    sizes[rows.dim] = rows.total
    whole = resize(x, sizes)
    put_part(whole, x, rows, ranks)
    return whole


def copy_part(x: Tensor, rows: RowTag, ranks: MeshDim) -> Tensor:
    """Return a copy of this rank's rows of ``x``, a tensor with all rows, in its order of dims in memory."""
    part = part_of(x, rows, ranks)
    return resize(x, part.shape).copy_(part)


def run_rows(
    placed: PlacedRows,
    ranks: MeshDim,
    rule: Callable[..., Any],
    func: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function whose rows do not depend on each other, with the bits of one process.

    Args:
        rule: The rule for the function on a rank's rows, which exchanges nothing for these arguments.
    """
    flat = [*args, *kwargs.values()]
    is_sharded = [rows_of(x) is not None for x in flat]

    def call(function: Callable[..., Any], values: Sequence[Any]) -> Any:
        positional, named = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        return function(*positional, **named)

    def fill_in(tensors: Sequence[Tensor]) -> list[Any]:
        remaining = iter(tensors)
        return [next(remaining) if sharded else x for x, sharded in zip(flat, is_sharded, strict=True)]

    def compute(tensors: Sequence[Tensor]) -> Any:
        return call(lambda *values, **named: rule(ranks, func, values, named), fill_in(tensors))

    def compute_at_place(tensors: Sequence[Tensor], rows: RowTag) -> Tensor:
        wholes = [place(x, tag, ranks) for x in tensors if (tag := rows_of(x)) is not None]
        out = call(func, fill_in(wholes))
        part = copy_part(out, rows, ranks)
        if out is wholes[0]:
            # func writes to its first argument, and so must this.
            return tensors[0].copy_(part)
        return part

    tensors = [x for x in flat if rows_of(x) is not None]
    kind = (name_of(func), *map(bits_key, args), *[(name, bits_key(x)) for name, x in kwargs.items()])
    return placed.run(kind, tensors, compute, compute_at_place)


def bits_key(x: Any) -> Any:
    """Return what the bits of a function may depend on, of one of its arguments."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, rows_of(x)
    if isinstance(x, (list, tuple)):
        return tuple([bits_key(item) for item in x])
    if isinstance(x, (torch.dtype, int, float, str, bool)) or x is None:
        return type(x), x
    return type(x)
