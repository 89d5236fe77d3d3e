"""The pieces of a sequence that each rank holds, or each group of ranks after it has exchanged tokens for heads.

A :class:`~para_core.layout.sequence.SequenceLayout` says what a user declared, per segment; a :class:`Layout`
says where the parts lie. Attention, fetches and the rows of images use the latter. Tests:
tests/layout/test_sequence.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from para_core.layout.runs import starts_of
from para_core.layout.sequence import Run, SequenceLayout


class Piece(NamedTuple):
    """Consecutive positions of a sequence.

    A ``replicated`` piece is held by all ranks, so that it is never sent. Pieces of neighbouring ranks follow
    each other in the sequence; with ``descending``, they do so from the last rank to the first.
    """

    start: int
    length: int
    replicated: bool = False
    descending: bool = False


@dataclass(frozen=True)
class Layout:
    """The pieces that each of some neighbouring ranks holds, in the order in which they lie in its tensor.

    All ranks hold equally many pieces, at least one. Piece i of each rank is a part of the same segment: if it
    is not replicated, it begins where that of the rank before it ends (of the rank after it, if ``descending``).
    A piece may be empty. Nothing checks this: the layouts that :meth:`of`, :meth:`consecutive` and an ordered
    :meth:`group_ranks` return are so. What :meth:`only` returns is for :meth:`runs` and :meth:`size` alone.

    Lengths may be symbolic, except in :meth:`consecutive`: this class only adds them.

    >>> from para_core.layout.sequence import Segment
    >>> segments = Segment("text", 3, replicated=True), Segment("image", 5)
    >>> layout = Layout.of(SequenceLayout(segments, ranks=2))
    >>> layout.runs(1), layout.runs(1, replicated=False), layout.offsets(1, replicated=False)
    ([(0, 3), (6, 2)], [(6, 2)], [(3, 2)])
    """

    pieces: tuple[tuple[Piece, ...], ...]

    @staticmethod
    def of(sequence: SequenceLayout, ranks: Sequence[int] | None = None) -> Layout:
        """Return the pieces of each of ``ranks`` (all, by default) of ``sequence``. They must be consecutive and
        ascending.
        """
        ranks = range(sequence.ranks) if ranks is None else ranks
        pieces: list[list[Piece]] = [[] for _ in ranks]
        before = 0
        for segment in sequence.segments:
            for rank, pieces_of_rank in zip(ranks, pieces, strict=True):
                # Only a balanced segment has a second run, in its back half. Ranks hold the back half in
                # descending order: the first rank its end.
                for index, (start, length) in enumerate(segment.runs(rank, sequence.ranks)):
                    pieces_of_rank.append(
                        Piece(before + start, length, segment.replicated, descending=index == 1)
                    )
            before = before + segment.total
        return Layout(tuple([tuple(pieces_of_rank) for pieces_of_rank in pieces]))

    @staticmethod
    @lru_cache(maxsize=4096)
    def consecutive(sizes: tuple[int, ...]) -> Layout:
        """Return the layout in which each rank holds ``sizes[rank]`` positions, after those of the rank
        before it. Sizes must be plain numbers, because results are cached by them.

        >>> Layout.consecutive((3, 0, 2)).runs(2)
        [(3, 2)]
        """
        return Layout(tuple([(Piece(*run),) for run in zip(starts_of(sizes), sizes, strict=True)]))

    def group_ranks(self, width: int, *, ordered: bool = True) -> Layout:
        """Return the layout of groups of ``width`` neighbouring ranks, each of which holds the pieces of all
        its ranks. ``width`` must divide the number of ranks.

        They are in the order of the sequence, or, if not ``ordered``, rank by rank. Nothing may then be
        replicated, or a group would hold it several times (``AttentionSpec.orders_queries`` sees to that), and
        pieces i of the groups are not parts of the same segment any more.

        >>> layout = Layout(((Piece(0, 3, True), Piece(3, 3)), (Piece(0, 3, True), Piece(6, 2))))
        >>> layout.group_ranks(2).runs(0)
        [(0, 3), (3, 5)]
        """
        if width == 1:
            return self
        groups = [self.pieces[first : first + width] for first in range(0, len(self.pieces), width)]
        if ordered:
            return Layout(tuple([_join_ranks(group) for group in groups]))
        return Layout(tuple([tuple([piece for pieces in group for piece in pieces]) for group in groups]))

    def only(self, *ranks: int, replicated: bool | None = None) -> Layout:
        """Return the layout of one rank that holds the pieces of ``ranks``, rank by rank; see :meth:`runs`."""
        return Layout((tuple(self._select(ranks, replicated)),))

    def runs(self, rank: int = 0, *, replicated: bool | None = None) -> list[Run]:
        """Return the positions that ``rank`` holds, as runs ``(start, length)`` in its order.

        ``replicated`` selects the replicated pieces (True), the sharded ones (False), or both (None).
        """
        return [(piece.start, piece.length) for piece in self._select([rank], replicated)]

    def size(self, rank: int = 0, *, replicated: bool | None = None) -> int:
        """Return the number of tokens that ``rank`` holds; see :meth:`runs`."""
        return sum([piece.length for piece in self._select([rank], replicated)])

    def sizes(self, *, replicated: bool | None = None) -> list[int]:
        """Return the number of tokens that each rank holds; see :meth:`runs`."""
        return [self.size(rank, replicated=replicated) for rank in range(len(self.pieces))]

    def offsets(self, rank: int = 0, *, replicated: bool) -> list[Run]:
        """Return where the replicated (or the sharded) pieces of ``rank`` lie in its tensor, one run per piece."""
        pieces = self.pieces[rank]
        starts = starts_of([piece.length for piece in pieces])
        return [
            (start, piece.length)
            for start, piece in zip(starts, pieces, strict=True)
            if piece.replicated == replicated
        ]

    def _select(self, ranks: Iterable[int], replicated: bool | None) -> list[Piece]:
        """Return the pieces of ``ranks``, rank by rank; see :meth:`runs`."""
        return [
            piece
            for rank in ranks
            for piece in self.pieces[rank]
            if replicated is None or piece.replicated == replicated
        ]


def _join_ranks(pieces: Sequence[Sequence[Piece]]) -> tuple[Piece, ...]:
    """Return the pieces that neighbouring ranks hold together: each joins piece i of every rank, which follow
    each other (:class:`Layout`).
    """
    joined = []
    for neighbours in zip(*pieces, strict=True):
        first = neighbours[-1] if neighbours[0].descending else neighbours[0]
        length = first.length if first.replicated else sum([piece.length for piece in neighbours])
        joined.append(first._replace(length=length))
    return tuple(joined)
