"""Which rank holds which tokens. Pure values: no torch.distributed, no tensors.

Under ``torch.compile`` lengths are symbolic: this file only adds, subtracts, multiplies and floor-divides them, and
never branches on one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one kind: replicated, or cut over the sequence ranks as ``torch.tensor_split`` cuts.

    The first ``total % ranks`` ranks hold one token more; with fewer tokens than ranks the last ones hold none.

    >>> Segment("image", 10).sizes(ranks=4)
    (3, 3, 2, 2)
    >>> Segment("text", 7, replicated=True).sizes(ranks=2)
    (7, 7)
    """

    name: str
    total: int  # tokens of the whole sequence, >= 0; symbolic under torch.compile
    replicated: bool = False

    def sizes(self, ranks: int) -> tuple[int, ...]:
        """Local length on each of ``ranks`` (>= 1) ranks."""
        return tuple([self.size(rank, ranks) for rank in range(ranks)])

    def size(self, rank: int, ranks: int) -> int:
        """Local length on ``rank``."""
        if self.replicated:
            return self.total
        # No divmod and no branch on the length: both fail once Dynamo makes lengths symbolic.
        return (self.total + ranks - 1 - rank) // ranks

    def start(self, rank: int, ranks: int) -> int:
        """Position, within this segment, of the first token that ``rank`` holds."""
        if self.replicated:
            return 0
        return sum([self.size(earlier, ranks) for earlier in range(rank)])


@dataclass(frozen=True)
class SequenceLayout:
    """The segments of one sequence, in order, over ``ranks`` sequence ranks.

    Each rank holds, in the same order, its part of every segment; a replicated segment it holds whole.

    >>> layout = SequenceLayout((Segment("text", 3, replicated=True), Segment("image", 5)), ranks=2)
    >>> layout.sizes(), layout.total
    ((6, 5), 8)
    """

    segments: tuple[Segment, ...]
    ranks: int

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a SequenceLayout needs at least one Segment, got none.")
        if self.ranks < 1:
            raise ValueError(f"a SequenceLayout needs ranks >= 1, got {self.ranks}.")

    @property
    def total(self) -> int:
        """Tokens of the whole sequence; a replicated token counts once."""
        return sum([segment.total for segment in self.segments])

    @property
    def sharded(self) -> tuple[Segment, ...]:
        return tuple([segment for segment in self.segments if not segment.replicated])

    @property
    def replicated(self) -> tuple[Segment, ...]:
        return tuple([segment for segment in self.segments if segment.replicated])

    def sizes(self) -> tuple[int, ...]:
        """Local length on each rank."""
        return tuple([self.size(rank) for rank in range(self.ranks)])

    def size(self, rank: int) -> int:
        """Local length on ``rank``."""
        return sum([segment.size(rank, self.ranks) for segment in self.segments])

    def sharded_size(self, rank: int) -> int:
        """Tokens on ``rank`` that no other rank holds."""
        return sum([segment.size(rank, self.ranks) for segment in self.sharded])

    def runs(self, rank: int, *, replicated: bool) -> tuple[tuple[int, int], ...]:
        """``(start, length)``, in positions of the whole sequence, of what ``rank`` holds of either kind, in order.

        >>> SequenceLayout((Segment("text", 3), Segment("image", 5)), ranks=2).runs(1, replicated=False)
        ((2, 1), (6, 2))
        """
        runs = []
        before = 0
        for segment in self.segments:
            if segment.replicated == replicated:
                runs.append((before + segment.start(rank, self.ranks), segment.size(rank, self.ranks)))
            before = before + segment.total
        return tuple(runs)


def even_layout(total: int, ranks: int) -> SequenceLayout:
    """One sharded sequence of ``total`` tokens."""
    return SequenceLayout((Segment("sequence", total),), ranks)


def concatenations(totals: tuple[int, ...], ranks: int) -> list[SequenceLayout]:
    """Each sequence, and each choice of several in their order."""
    chosen: list[tuple[int, ...]] = [()]
    for total in totals:
        chosen = chosen + [(*before, total) for before in chosen]
    return [
        SequenceLayout(tuple([even_layout(total, ranks).segments[0] for total in choice]), ranks)
        for choice in chosen
        if choice
    ]
