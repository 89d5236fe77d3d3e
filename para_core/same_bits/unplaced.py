"""Products of few rows whose place in one process is unknown, such as those of tokens that are joined with
samples.

Their rows are parts of those of one process, or all of them: if all ranks have the same rows, each has all, and
otherwise they share them. Only all ranks together know which, and how many one process has, and that is after
the call, when the weights may be gone again. So each rank tries, when the product is computed, the numbers of
rows that one process may have, and :func:`find_differences` looks up the right one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from para_core.same_bits.one_process import OneProcess, resize
from para_core.same_bits.rows import few_rows, linear


@dataclass(frozen=True)
class UnplacedProduct:
    """A product of few rows of one rank.

    Args:
        text: The module, the function, and the shape and type of the rank's tensor.
        samples: The index of the rank's samples. Ranks with other samples share no rows: these are padded.
        size: The number of rows, in the last dim but one.
        digest: The digest of the rows. If it is equal on all ranks, each has all rows.
        equal_for: The numbers of rows of one process for which the rank's rows have the same bits, of those
            tried.
        enough: The number of rows from which every number gives the bits of this one; it was tried if larger
            numbers are possible.
    """

    text: str
    samples: int
    size: int
    digest: str
    equal_for: frozenset[int]
    enough: int

    @property
    def name(self) -> str:
        """The module and the function, the same on all ranks that make the same call."""
        return self.text.rpartition(" of ")[0]

    def has_bits_of(self, rows: int) -> bool:
        """Whether the rank's rows have the bits that they have among ``rows`` rows; False if that was not tried."""
        return self.size in (0, rows) or min(rows, self.enough) in self.equal_for


def enough_rows(x: Tensor) -> int:
    """Return from which size of the last dim but one a product of ``x`` has the same bits for every number of rows."""
    return -(-few_rows(x) // max(1, prod(x.shape[:-2])))


def try_numbers_of_rows(
    one_process: OneProcess, x: Tensor, output: Tensor, *args: Any, **kwargs: Any
) -> frozenset[int]:
    """Return the numbers of rows of one process with which ``F.linear(x, ...)`` has the bits of ``output``.

    Numbers are tried that one process may have if those of the ranks differ by at most one.
    """
    if x.ndim < 2 or not x.numel():
        return frozenset()
    ranks, size, enough = one_process.ranks, x.shape[-2], enough_rows(x)
    totals = {
        min(total, enough) for total in range(ranks * (size - 1), ranks * (size + 1) + 1) if total > size
    }
    equal_for = []
    for total in totals:
        rows = resize(x, [*x.shape[:-2], total, x.shape[-1]])
        rows.narrow(-2, 0, size).copy_(x)
        if have_equal_bytes(linear(one_process, rows, *args, **kwargs).narrow(-2, 0, size), output):
            equal_for.append(total)
    return frozenset(equal_for)


def digest_of(x: Tensor) -> str:
    """Return the SHA-256 of the bytes of ``x``, which waits for its device."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def find_differences(of_ranks: Sequence[Sequence[UnplacedProduct]]) -> list[str]:
    """Return what is not known to have the bits of one process, as text, from the products of all ranks."""
    names = [[product.name for product in products] for products in of_ranks]
    if any(others != names[0] for others in names):
        # Ranks make other calls, as those of experts without tokens.
        texts = [product.text for products in of_ranks for product in products]
        return [f"{text}: few rows, of no known sequence; other ranks have others" for text in texts]
    found = []
    for products in zip(*of_ranks, strict=True):
        for product in products:
            others = [other for other in products if other.samples == product.samples]
            total = product.size
            if any(other.digest != product.digest for other in others):
                total = sum(other.size for other in others)
            if not product.has_bits_of(total):
                found.append(
                    f"{product.text}: few rows, of no known sequence, {total} of them in one process, among which "
                    "they have other bits, or are not known to have these"
                )
    return found


def have_equal_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same type and bytes."""
    # A copy, because a contiguous tensor whose last dim has one element may have any stride there.
    if x.dtype != y.dtype:
        return False
    copies = [z.clone(memory_format=torch.contiguous_format).view(torch.uint8) for z in (x, y)]
    return torch.equal(*copies)
