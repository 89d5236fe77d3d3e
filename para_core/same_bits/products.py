"""Whether products of few rows have the bits that they have among the rows of one process.

A rank does not know all about its rows: tokens may be joined with samples, or be those of an expert. Only all
ranks together know, and that is after the call, when the weights may be gone again. So each rank tries, when
a product is computed, the numbers of rows that one process may have, and :func:`find_differences` looks up
the right one: if all ranks have the same rows, each has all, and otherwise they share them.

:mod:`.row_check` records the products of a rank, and :mod:`.call` sends them and calls
:func:`find_differences`. Tests: tests/same_bits/test_rows.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from para_core.same_bits.at_place import TorchCall, resize
from para_core.same_bits.one_process import OneProcess, Tokens
from para_core.same_bits.rows import enough_rows, part_like

# Every number of rows is tried up to the one from which bits do not depend on it, if these are as few.
_MOST_TRIED = 16


@dataclass(frozen=True)
class LinearProduct:
    """A call of ``F.linear`` by one rank. In what follows, rows are those along one dim: that of the tokens.

    Args:
        name: The module and the function, the same on all ranks.
        sizes: The shape and the type of the rank's tensor, as text.
        samples: The index of the rank's samples. Ranks with other samples share no rows: these are padded.
        size: The number of rows.
        is_routed: Whether these are the rows of a matrix, of no known sequence: tokens that the model chose
            by their values, if ranks have different numbers of them.
        digest: The digest of the tensor. If it is equal on all ranks, each has all rows. None if the tensor
            has so many rows that their number does not matter.
        total: The number of rows in one process, if ranks share those of the sequence for which this rank
            took them; None if it is no known sequence.
        equal_for: The numbers of rows of one process for which the rank's rows have the same bits, of those
            tried.
        enough: The number of rows from which every number gives the bits of this one; it was tried if larger
            numbers are possible.
    """

    name: str
    sizes: str
    samples: int
    size: int
    is_routed: bool = False
    digest: str | None = None
    total: int | None = None
    equal_for: frozenset[int] = frozenset()
    enough: int = 1

    def has_bits_of(self, rows: int) -> bool:
        """Whether the rank's rows have the bits that they have among ``rows`` rows; False if that was not tried."""
        return self.digest is None or self.size == 0 or min(rows, self.enough) in self.equal_for


def describe_product(
    name: str, sizes: str, samples: int, tokens: Tokens, x: Tensor, equal_for: frozenset[int] | None
) -> LinearProduct:
    """Return the record of ``F.linear(x, ...)``. Waits for the device if ``x`` has few rows.

    Args:
        name, sizes, samples: As in :class:`LinearProduct`.
        tokens: The dim of ``x`` that has this rank's tokens, and their place; None if it is unknown.
        x: The rank's tensor.
        equal_for: What :func:`try_numbers_of_rows` returned; None if ``x`` has many rows.
    """
    dim, total = _rows_of(x, tokens)
    size = x.shape[dim]
    product = LinearProduct(name, sizes, samples, size, is_routed=x.ndim == 2 and tokens is None)
    if equal_for is None:
        return product
    return replace(product, digest=_digest(x), total=total, equal_for=equal_for, enough=_enough_along(x, dim))


def try_numbers_of_rows(
    call: TorchCall, one_process: OneProcess, tokens: Tokens, output: Tensor
) -> frozenset[int]:
    """Return the numbers of rows of one process with which ``call``, a linear product, has the bits of ``output``.

    The numbers of :func:`_numbers_of_rows` are tried.
    """
    x = call.x
    if not x.numel():
        return frozenset()
    dim, total = _rows_of(x, tokens)
    equal_for = []
    for number in _numbers_of_rows(one_process.ranks, x.shape[dim], _enough_along(x, dim), total):
        sizes = [*x.shape]
        sizes[dim] = number
        first = 0
        # Rows of a matrix that are of a known sequence are no samples.
        if x.ndim > 2 or total is None or number == x.shape[0]:
            sizes[0] *= one_process.batch_size
            first = one_process.batch_index * (sizes[0] // one_process.batch_size)
        rows = resize(x, sizes)
        part_like(x, rows, first).copy_(x)
        if have_equal_bytes(part_like(output, call.on(rows), first), output):
            equal_for.append(number)
    return frozenset(equal_for)


def _rows_of(x: Tensor, tokens: Tokens) -> tuple[int, int | None]:
    """Return the dim of the rows of ``x``, and their number in one process; None if it is of no known sequence."""
    if tokens is None:
        return max(0, x.ndim - 2), None
    return tokens[0], tokens[1].total


def _enough_along(x: Tensor, dim: int) -> int:
    """Return from which size of ``dim`` a product of ``x`` has the same bits for every number of rows."""
    others = prod(x.shape[:-1]) // max(1, x.shape[dim])
    return -(-enough_rows(x) // max(1, others))


def _numbers_of_rows(ranks: int, size: int, enough: int, total: int | None) -> set[int]:
    """Return the numbers of rows that one process may have, if this rank has ``size``: these, those of the
    sequence for which they were taken, and what ranks have together whose numbers differ by at most one. Or
    all numbers, if these are few.
    """
    numbers = {size, *range(max(size, ranks * (size - 1)), ranks * (size + 1) + 1)}
    if total is not None:
        numbers.add(total)
    if enough - size <= _MOST_TRIED:
        numbers.update(range(size, enough + 1))
    return {min(number, max(size, enough)) for number in numbers}


def _digest(x: Tensor) -> str:
    """Return the SHA-256 of the bytes of ``x``, which waits for its device."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def find_differences(of_ranks: Sequence[Sequence[LinearProduct]]) -> list[str]:
    """Return what is not known to have the bits of one process, as text, from the products of all ranks."""
    calls_of_ranks = [_group_by_name(products) for products in of_ranks]
    found: list[str] = []
    for name in dict.fromkeys(product.name for products in of_ranks for product in products):
        of_each = [calls.get(name, []) for calls in calls_of_ranks]
        numbers = [len(products) for products in of_each]
        if len({*numbers}) > 1:
            found.append(f"{name}: ranks call it {' and '.join(map(str, numbers))} times")
            continue
        for products in zip(*of_each, strict=True):
            found += _differences_of(products)
    return found


def _group_by_name(products: Sequence[LinearProduct]) -> dict[str, list[LinearProduct]]:
    """Return the calls of each module, in their order."""
    calls: dict[str, list[LinearProduct]] = {}
    for product in products:
        calls.setdefault(product.name, []).append(product)
    return calls


def _differences_of(of_ranks: Sequence[LinearProduct]) -> Iterator[str]:
    """Yield what is not known to have the bits of one process, as text, of one product of each rank."""
    for product in of_ranks:
        sharing = [other for other in of_ranks if other.samples == product.samples]
        sizes = [other.size for other in sharing]
        if product.is_routed and max(sizes) - min(sizes) > 1:
            yield f"{product.name} of {product.sizes}: rows that the model chooses, {sum(sizes)} in one process now"
            continue
        total = _count_rows(product, sharing)
        if not product.has_bits_of(total):
            yield (
                f"{product.name} of {product.sizes}: {total} rows in one process, among which they have other bits, "
                "or are not known to have these"
            )


def _count_rows(product: LinearProduct, sharing: Sequence[LinearProduct]) -> int:
    """Return the number of rows of ``product`` in one process, which the ranks of ``sharing`` shard or replicate."""
    if all(other.digest == product.digest for other in sharing):
        return product.size
    totals = {other.total for other in sharing}
    # Rows of one known sequence may be partly replicated, so that their sum over ranks counts some twice.
    if len(totals) == 1 and product.total is not None:
        return product.total
    return sum(other.size for other in sharing)


def have_equal_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same type and bytes."""
    # A copy, because a contiguous tensor whose last dim has one element may have any stride there.
    if x.dtype != y.dtype:
        return False
    copies = [z.clone(memory_format=torch.contiguous_format).view(torch.uint8) for z in (x, y)]
    return torch.equal(*copies)
