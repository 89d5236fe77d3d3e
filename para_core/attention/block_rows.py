"""The places of the tokens of each rank of a Ulysses group: in its own tensors, and in the group's block.

:class:`~para_core.attention.ulysses.UlyssesPlan` makes them for queries and keys, and the swaps
(:mod:`.swap`) read them. Tests: tests/attention/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from para_core.distributed.cached_property import cached_property
from para_core.layout.pieces import Layout, Piece
from para_core.layout.runs import join_neighbours
from para_core.layout.sequence import Run, SequenceLayout


class Row(NamedTuple):
    """A run of tokens of a rank: where they begin in its own tensor and in the block, and how many there are."""

    local: int
    block: int
    length: int
    replicated: bool


class BlockRows:
    """The tokens of a *block*: all tokens that ``width`` neighbouring ranks from ``first`` on hold, in the
    order of the sequence. Replicated tokens are in it once. ``index`` is this rank's position among the
    ranks. If not ``ordered``, the tokens are in the order in which they arrive, rank by rank; nothing may
    then be replicated.

    For the tokens 0 to 7 on two ranks, of which 0 and 1 are replicated text and the others two sharded
    segments::

        rank 0:  0 1 | 2 | 5 6         block:  0 1 | 2 | 3 4 | 5 6 | 7
        rank 1:  0 1 | 3 4 | 7

    Lengths may be symbolic: while tracing, this class only adds them.

    Attributes:
        sequence: The layout of the tokens. Tensors with one layout object can share a table of a swap.
        index: This rank's position among the ranks.
        replicates: Whether any token is replicated.
        is_rank_by_rank: Whether the tokens arrive, rank by rank, in the order of the block.
        of_peers: For each rank, its rows in the order of its tensor.
        in_order: ``(rank, number of its row)`` for all rows in the order of the block. Of a replicated row,
            which all ranks have, it is that of this rank.
        size: Number of tokens of the block.
    """

    def __init__(
        self, sequence: SequenceLayout, first: int, width: int, index: int, *, ordered: bool = True
    ) -> None:
        held = Layout.of(sequence, range(first, first + width)).pieces
        self.sequence = sequence
        of_peers: list[list[Row]] = [[] for _ in held]
        self.in_order: list[tuple[int, int]] = []
        self.index, self.size = index, 0
        local = [0] * width
        for peer, number in _order(held, ordered=ordered):
            piece = held[peer][number]
            of_peers[peer].append(Row(local[peer], self.size, piece.length, piece.replicated))
            local[peer] = local[peer] + piece.length
            if not piece.replicated or peer == index:
                self.in_order.append((peer, number))
            # All peers begin a replicated piece at one place. They come in ascending order, because only the
            # later half of a balanced segment descends, so the last of them ends it.
            if not piece.replicated or peer == width - 1:
                self.size = self.size + piece.length
        self.of_peers = of_peers
        self.replicates = any(row.replicated for row in of_peers[0])
        # This does not compare lengths, which may be symbolic.
        self.is_rank_by_rank = not ordered or (len(of_peers[0]) == 1 and not self.replicates)

    def sizes(self, *, replicated: bool) -> list[int]:
        """Return the number of tokens of each rank, with or without the ``replicated`` ones."""
        return [
            sum([row.length for row in rows if replicated or not row.replicated]) for rows in self.of_peers
        ]

    def local_runs(self, *, replicated: bool) -> list[Run]:
        """Return the tokens of this rank's tensor, with or without the ``replicated`` ones, as runs."""
        rows = self.of_peers[self.index]
        return _join_unless_traced(
            [(row.local, row.length) for row in rows if replicated or not row.replicated]
        )

    @cached_property
    def local_sharded_runs(self) -> list[Run]:
        """The tokens of this rank's tensor that are not replicated, as runs ``(start, length)``."""
        return self.local_runs(replicated=False)

    @cached_property
    def local_size(self) -> int:
        """The number of tokens of this rank's tensor."""
        return sum([row.length for row in self.of_peers[self.index]])

    def block_runs(self, rank: int, *, replicated: bool) -> list[Run]:
        """Return where the tokens of ``rank``, with or without the ``replicated`` ones, lie in the block, as runs."""
        rows = self.of_peers[rank]
        return _join_unless_traced(
            [(row.block, row.length) for row in rows if replicated or not row.replicated]
        )

    @cached_property
    def arrivals(self) -> list[tuple[bool, Run]]:
        """The runs that form the block, if each rank sends its sharded tokens, and these arrive rank by rank.

        Each is ``(replicated, (start, length))``. ``start`` counts the tokens that arrived; for replicated
        tokens, which are not sent, it is in this rank's tensor.
        """
        runs: list[tuple[bool, Run]] = []
        starts = self.arrival_starts(replicated=False)
        for rank, number in self.in_order:
            row = self.of_peers[rank][number]
            if row.replicated:
                start = row.local
            else:
                start = starts[rank][number]
            runs.append((row.replicated, (start, row.length)))
        if torch.compiler.is_compiling():
            return runs
        joined: list[tuple[bool, Run]] = []
        for replicated, (start, length) in runs:
            if joined and joined[-1][0] == replicated and sum(joined[-1][1]) == start:
                first, count = joined[-1][1]
                joined[-1] = (replicated, (first, count + length))
            elif length:
                joined.append((replicated, (start, length)))
        return joined

    def arrival_starts(self, *, replicated: bool) -> list[list[int]]:
        """Return for each row of each rank where it begins in the concatenation of the tokens that the ranks send."""
        starts: list[list[int]] = []
        before = 0
        for rows in self.of_peers:
            starts.append([])
            for row in rows:
                starts[-1].append(before)
                if replicated or not row.replicated:
                    before = before + row.length
        return starts


def _join_unless_traced(runs: list[Run]) -> list[Run]:
    """Join neighbouring runs. While tracing, lengths may be symbolic and are not compared."""
    if torch.compiler.is_compiling():
        return runs
    return join_neighbours(runs)


def _order(held: Sequence[Sequence[Piece]], *, ordered: bool) -> list[tuple[int, int]]:
    """Return ``(rank, number of its piece)`` for all pieces, in the order of the sequence or rank by rank."""
    ranks, numbers = range(len(held)), range(len(held[0]))
    if not ordered:
        return [(rank, number) for rank in ranks for number in numbers]
    order: list[tuple[int, int]] = []
    for number in numbers:
        descending = held[0][number].descending
        if descending:
            order += [(rank, number) for rank in reversed(ranks)]
        else:
            order += [(rank, number) for rank in ranks]
    return order
