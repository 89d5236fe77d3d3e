"""Layouts: which tokens of a sequence each rank holds. They are plain values, without tensors or
torch.distributed.

Under ``torch.compile`` lengths are symbolic. This file therefore only adds, subtracts, multiplies and
floor-divides lengths, and never branches on ``total``, which would specialize the graph. The exceptions are
``together``, which is compared with 1, and its check, which takes a remainder of ``total``: a graph may be
specialized for ``together``.

Tuples are made of lists, ``tuple([...])``, because Dynamo traces a list comprehension more simply than a
generator expression, which is an object with a frame.

Users make them as ``para_core.Segment`` and ``para_core.SequenceLayout``. What groups of ranks hold, and rows
of images, are :class:`para_core.layout.pieces.Layout`. Tests: tests/layout/test_sequence.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from torch import SymInt

# A run is a number of consecutive tokens, as (start, length).
Run = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one kind (such as text or image) in a sequence, sharded over ranks or replicated
    on each.

    Tokens are sharded as by :func:`torch.tensor_split`: the first ``total % ranks`` ranks hold one token
    more. If there are fewer tokens than ranks, the last ranks hold none.

    >>> Segment("image", 10).sizes(ranks=4)
    (3, 3, 2, 2)
    >>> Segment("text", 7, replicated=True).sizes(ranks=2)
    (7, 7)

    A ``balanced`` segment is split into ``2 · ranks`` parts. Rank r holds the r-th part from the front and
    the r-th from the back, so that all ranks have about equal work under a causal mask.

    >>> Segment("video", 8, balanced=True).runs(rank=0, ranks=2)
    ((0, 2), (6, 2))

    Groups of ``together`` consecutive tokens, such as those of a video frame, are not split between ranks. A
    replicated segment may have ``together``, which does not change what a rank holds; rules of a plan
    recognise tensors with one entry per group by it.

    >>> Segment("video", 15, together=5).sizes(ranks=2)
    (10, 5)

    Raises:
        TypeError: ``total`` or ``together`` is no integer, such as a tensor.
        ValueError: The segment is replicated and balanced, or ``together`` does not divide ``total`` or is
            combined with ``balanced``.
    """

    name: str
    # Number of tokens over all ranks, at least 0; symbolic under torch.compile, where a check would be a guard.
    total: int
    replicated: bool = False
    balanced: bool = False
    together: int = 1  # Length of groups of tokens that stay on one rank; divides ``total``.

    def __post_init__(self) -> None:
        if type(self.total) is not int or type(self.together) is not int:
            self._convert_numbers()
        if self.replicated and self.balanced:
            raise ValueError(
                f"segment {self.name!r} is replicated and balanced; expected at most one of the two."
            )
        if self.together != 1 and (self.balanced or self.together < 1 or self.total % self.together):
            raise ValueError(
                f"segment {self.name!r} has {self.total} tokens, together={self.together}, balanced={self.balanced}; "
                "expected together to divide the number of tokens, and balanced=False."
            )

    def _convert_numbers(self) -> None:
        """Replace NumPy numbers, such as ``np.prod(grid)``, by integers, because ranks compare lengths as
        JSON. Symbolic numbers stay.
        """
        for name in ("total", "together"):
            number = getattr(self, name)
            if isinstance(number, Integral):
                object.__setattr__(self, name, int(number))
            elif not isinstance(number, SymInt):
                raise TypeError(f"segment {self.name!r} has {name}={number!r}; expected an integer.")

    def sizes(self, ranks: int) -> tuple[int, ...]:
        """Return the number of this segment's tokens on each of ``ranks`` (>= 1) ranks."""
        if self.replicated:
            return (self.total,) * ranks
        if self.together != 1:
            return tuple([self.size(rank, ranks) for rank in range(ranks)])
        # This repeats _part_size and the choice of parts in size() and runs(), because Dynamo takes time to
        # trace each Python call. tests/layout/test_sequence.py compares the three.
        parts = ranks * (1 + self.balanced)
        sizes = [(self.total + parts - 1 - part) // parts for part in range(parts)]
        if self.balanced:
            # Rank r of n holds the parts r and 2 n - 1 - r of 2 n.
            sizes = [
                front + back for front, back in zip(sizes[:ranks], sizes[: -ranks - 1 : -1], strict=True)
            ]
        return tuple(sizes)

    def size(self, rank: int, ranks: int) -> int:
        """Return the number of this segment's tokens on ``rank``, if ``ranks`` ranks share the segment."""
        if self.replicated:
            return self.total
        if self.balanced:
            return _part_size(self.total, rank, 2 * ranks) + _part_size(
                self.total, 2 * ranks - 1 - rank, 2 * ranks
            )
        if self.together != 1:
            return self.together * _part_size(self.total // self.together, rank, ranks)
        return _part_size(self.total, rank, ranks)

    def runs(self, rank: int, ranks: int) -> tuple[Run, ...]:
        """Return the tokens that ``rank`` holds, in order, as runs ``(start, length)`` of positions in this segment."""
        if self.replicated:
            return ((0, self.total),)
        if self.together != 1:
            units = self.total // self.together
            return ((self.together * _part_start(units, rank, ranks), self.size(rank, ranks)),)
        parts, num_parts = [rank], ranks
        if self.balanced:
            parts, num_parts = [rank, 2 * ranks - 1 - rank], 2 * ranks
        return tuple(
            [
                (_part_start(self.total, part, num_parts), _part_size(self.total, part, num_parts))
                for part in parts
            ]
        )


def _part_size(total: int, part: int, num_parts: int) -> int:
    """Return the number of tokens of ``part``: the first ``total % num_parts`` parts have one more than the others."""
    # Use neither divmod nor a branch on the length, because both fail when Dynamo makes lengths symbolic.
    return (total + num_parts - 1 - part) // num_parts


def _part_start(total: int, part: int, num_parts: int) -> int:
    """Return the index of the first token of ``part``: ``part * quotient + min(part, remainder)``, where
    ``quotient`` and ``remainder`` are those of ``total`` divided by ``num_parts``.
    """
    quotient = total // num_parts
    # This computes min(part, remainder) without a branch: the floor division gives 1 if part >= remainder,
    # else 0.
    beyond = part - (total - quotient * num_parts)
    return part * quotient + part - beyond * ((beyond + num_parts) // num_parts)


@dataclass(frozen=True)
class SequenceLayout:
    """The segments of one sequence, in order, and the number of ranks that share it.

    Each rank holds its part of every sharded segment and all tokens of every replicated segment, segment by
    segment.

    >>> layout = SequenceLayout((Segment("text", 3, replicated=True), Segment("image", 5)), ranks=2)
    >>> layout.sizes(), layout.total
    ((6, 5), 8)

    Raises:
        TypeError: ``segments`` is no tuple or list, or one of them is no :class:`Segment`.
        ValueError: There is no segment, or no rank.
    """

    segments: tuple[Segment, ...]
    ranks: int

    def __post_init__(self) -> None:
        if type(self.segments) is not tuple:
            if not isinstance(self.segments, (tuple, list)):
                raise TypeError(
                    f"segments is a {type(self.segments).__name__}; expected a tuple of Segment, also of a single one."
                )
            # Plans of attention calls are cached by layouts, and a list has no hash.
            object.__setattr__(self, "segments", tuple(self.segments))
        for segment in self.segments:
            if not isinstance(segment, Segment):
                raise TypeError(f"segments has {segment!r}; expected each to be a Segment.")
        if not self.segments:
            raise ValueError("a SequenceLayout needs at least one Segment, got none.")
        if self.ranks < 1:
            raise ValueError(f"a SequenceLayout needs ranks >= 1, got {self.ranks}.")

    @property
    def total(self) -> int:
        """The number of tokens of the whole sequence. A replicated token counts once."""
        return sum([segment.total for segment in self.segments])

    @property
    def sharded(self) -> tuple[Segment, ...]:
        return tuple([segment for segment in self.segments if not segment.replicated])

    @property
    def replicated(self) -> tuple[Segment, ...]:
        return tuple([segment for segment in self.segments if segment.replicated])

    def sizes(self) -> tuple[int, ...]:
        """Return the number of tokens that each rank holds, including replicated ones."""
        by_segment = [segment.sizes(self.ranks) for segment in self.segments]
        if len(by_segment) == 1:
            return by_segment[0]
        return tuple([sum(sizes) for sizes in zip(*by_segment, strict=True)])

    def size(self, rank: int) -> int:
        """Return the number of tokens that ``rank`` holds, including replicated ones."""
        return sum([segment.size(rank, self.ranks) for segment in self.segments])

    def sharded_size(self, rank: int) -> int:
        """Return the number of tokens of sharded segments that ``rank`` holds."""
        return sum([segment.size(rank, self.ranks) for segment in self.sharded])

    def runs(self, rank: int, *, replicated: bool | None = None) -> tuple[Run, ...]:
        """Return the tokens that ``rank`` holds, as runs ``(start, length)`` of positions in the whole
        sequence.

        The runs are in the order in which the rank holds them.

        Args:
            rank: The index of the rank.
            replicated: Whether to return only the tokens of replicated segments (True), only those of sharded
                segments (False), or both (None).

        A run may be empty: each segment has as many runs on every rank.

        >>> SequenceLayout((Segment("text", 3), Segment("image", 5)), ranks=2).runs(1)
        ((2, 1), (6, 2))
        """
        runs: list[Run] = []
        before = 0
        for segment in self.segments:
            if replicated is None or segment.replicated == replicated:
                runs += [(before + start, length) for start, length in segment.runs(rank, self.ranks)]
            before = before + segment.total
        return tuple(runs)


def even_layout(total: int, ranks: int, *, balanced: bool = False) -> SequenceLayout:
    """Return the layout of a sequence of ``total`` tokens that are divided over ``ranks`` as evenly as
    possible.

    If ``balanced`` is True, each rank holds one part of each half of the sequence, so that all ranks have
    about equal work in causal attention.
    """
    return SequenceLayout((Segment("sequence", total, balanced=balanced),), ranks)
