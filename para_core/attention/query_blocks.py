"""Queries at their place in the blocks of one process, for attention on a CPU.

A CPU computes queries in blocks, from the first one on (FlashAttentionKernel.cpp of PyTorch,
``q_split_size``), and the rows of a smaller block may get other bits. So a rank that has some of the queries
computes whole blocks of one process, with zeros in place of the queries that it does not have. This is not
done on a GPU, where nothing was measured.

Blocks then have the same bits if the CPU multiplies them in the same way. On CPUs with matrix instructions
for a 16-bit dtype (``cpublas::need_pack`` there) the number of queries of a call also decides whether it packs
its matrices, so a call of fewer blocks may get other bits.

Only :class:`~para_core.attention.gathered.GatheredKeys` uses it. Tests: tests/same_bits/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from para_core.layout.runs import take
from para_core.layout.sequence import Run

# (From so many queries of a call on, the size of its blocks), largest first: the conditions under which
# FlashAttentionKernel.cpp of torch 2.13 sets q_split_size. If tests/same_bits/test_attention.py fails with another
# torch, compare them with that file.
_BLOCK_SIZES = ((768, 256), (192, 64), (0, 32))


class QueryBlocks(NamedTuple):
    """A call of whole blocks, and the place of this rank's queries in it.

    Args:
        total: The number of queries of the call.
        runs: Where each run of this rank's queries stands, as ``(start, length)``, in their order.
    """

    total: int
    runs: tuple[Run, ...]

    def place(self, x: Tensor) -> Tensor:
        """Return zeros with the rows ``[..., S_q, D]`` of this rank at their place."""
        rows = x.new_zeros(*x.shape[:-2], self.total, x.shape[-1])
        parts = x.split([length for _, length in self.runs], dim=-2)
        for (start, length), part in zip(self.runs, parts, strict=True):
            rows.narrow(-2, start, length).copy_(part)
        return rows

    def take(self, out: Tensor) -> Tensor:
        """Return this rank's rows of a result. They may be a view of it."""
        return take(out, -2, self.runs)


def place_in_blocks(runs: Sequence[Run], total: int) -> QueryBlocks:
    """Return the call of the blocks that hold the positions ``runs``, of those of one process with ``total``
    queries.

    The call gets at least as many queries as give it blocks of the size of one process; whole blocks of zeros,
    in front, make up for missing ones. So each block has the size and the rows that it has in one process, and
    the last one, which may be smaller, stays the last. Which blocks are computed before it changes no bits, but
    for what the head of this file says.
    """
    least, size = next(entry for entry in _BLOCK_SIZES if total >= entry[0])
    touched = sorted({block for start, length in runs for block in _blocks_of_run(start, length, size)})
    if not touched:
        return QueryBlocks(0, tuple((0, 0) for _ in runs))
    rows = sum(min(size, total - block * size) for block in touched)
    missing = min(max(least, size), total) - rows
    front = max(0, -(-missing // size)) * size
    starts = {block: front + index * size for index, block in enumerate(touched)}
    placed = [(_start_of(start, length, size, starts), length) for start, length in runs]
    return QueryBlocks(front + rows, tuple(placed))


def _blocks_of_run(start: int, length: int, size: int) -> range:
    """Return the numbers of the blocks of ``size`` queries that a run overlaps; none for an empty run."""
    if length == 0:
        return range(0)
    return range(start // size, (start + length - 1) // size + 1)


def _start_of(start: int, length: int, size: int, starts: dict[int, int]) -> int:
    """Return where a run stands in the call, given where each block begins there. All blocks of a run are in
    the call, one after the other, so it stays in one piece.
    """
    if length == 0:
        return 0
    return starts[start // size] + start % size
