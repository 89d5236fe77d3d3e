"""The sizes that one process would have, for the tensors of a rank inside a call of a model with a plan.

Every file of this folder that pads or compares reads them here. Nothing is computed or sent. Tests:
tests/same_bits/test_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor, nn

from para_core.layout.sequence import Run, Segment, SequenceLayout
from para_core.plans.current_call import ranks_sharing_samples, segments_under_way


@dataclass(frozen=True)
class Place:
    """The place of a rank's part of a dim in that dim of one process.

    Args:
        total: The size of the dim in one process.
        runs: The positions of the rank's part, as runs ``(start, length)`` in the order of its tensor.
    """

    total: int
    runs: tuple[Run, ...]


# The sequences whose tokens a tensor holds, in order, or UNKNOWN: the name of each, or the number of its tokens
# if every rank has them all and the plan does not name it.
Names = tuple[str | int, ...]
UNKNOWN: Names = ()
# None if the tensor holds no tokens.
Sequences = Names | None

# The dim of a tensor that has this rank's tokens, and their place in one process; None if none has.
Tokens = tuple[int, Place] | None


def token_dims(x: Tensor) -> range:
    """Return the dims of ``x`` that may have tokens: the last has features, and the first samples, unless there
    are two dims.
    """
    if x.ndim == 2:
        return range(1)
    return range(1, x.ndim - 1)


@dataclass(frozen=True)
class OneProcess:
    """The call of one process, whose part this rank computes.

    Args:
        segments: The sequences of the call so far, in the order of the joint sequence.
        rank, ranks: This rank and the number of ranks that share tokens.
        ulysses: The number of ranks that share the heads of attention.
        batch_index, batch_size: The part of the samples that this rank has; ``(0, 1)`` if it has all.
        samples: The number of samples that this rank has.
    """

    segments: tuple[Segment, ...] = ()
    rank: int = 0
    ranks: int = 1
    batch_index: int = 0
    batch_size: int = 1
    ulysses: int = 1
    samples: int = 1

    @property
    def is_this_process(self) -> bool:
        """Whether this rank has all tokens and all samples."""
        return self.batch_size == 1 and all(segment.replicated for segment in self.segments)

    def place_in_one_process(self, x: Tensor, sequences: Sequences) -> Tokens:
        """Return the dim of ``x`` that has this rank's tokens of ``sequences``, and their place in one
        process; None if no dim has.

        It is one of :func:`token_dims`. The rows of a matrix are samples if there are as many, and tokens, or
        tokens of each sample, otherwise. The place of UNKNOWN sequences is a guess by sizes, which all ranks
        together check
        (:func:`~para_core.same_bits.products.find_differences`).
        """
        if self.ranks == 1 or sequences is None:
            return None
        places = self._places
        if sequences != UNKNOWN and self.count_tokens(sequences) in x.shape:
            size, place = _place_of(self._segments_of(sequences), self.rank, self.ranks)
            places = {size: place}
        if x.ndim == 2:
            return self._place_of_rows(x.shape[0], places)
        for dim in reversed(token_dims(x)):
            if x.shape[dim] in places:
                return dim, places[x.shape[dim]]
        return None

    def count_tokens(self, sequences: Names) -> int:
        """Return how many tokens of ``sequences`` this rank has."""
        return sum(segment.size(self.rank, self.ranks) for segment in self._segments_of(sequences))

    def _segments_of(self, sequences: Names) -> tuple[Segment, ...]:
        """Return the segments of ``sequences``, in this order. Names that the call has not noted are left out."""
        by_name: dict[str | int, Segment] = {segment.name: segment for segment in self.segments}
        for name in sequences:
            if isinstance(name, int):
                by_name[name] = Segment("", name, replicated=True)
        return tuple([by_name[name] for name in sequences if name in by_name])

    @cached_property
    def _places(self) -> dict[int, Place]:
        """The place of each number of tokens that neighbouring segments have on this rank."""
        places: dict[int, Place] = {}
        for first in range(len(self.segments)):
            for end in range(first + 1, len(self.segments) + 1):
                size, place = _place_of(self.segments[first:end], self.rank, self.ranks)
                # Of two sequences with as many tokens on this rank, the shorter one is as good, unless it has
                # few rows.
                if size not in places or places[size].total < place.total:
                    places[size] = place
        return places

    def _place_of_rows(self, rows: int, places: dict[int, Place]) -> Tokens:
        """Return dim 0, and the place of ``rows`` rows of a matrix; None if these are samples, or unknown."""
        if rows == self.samples:
            return None
        if rows in places:
            return 0, places[rows]
        place = places.get(rows // self.samples)
        if place is None or rows % self.samples:
            return None
        first = self.batch_index * self.samples
        starts = [sample * place.total for sample in range(first, first + self.samples)]
        runs = tuple([(start + position, length) for start in starts for position, length in place.runs])
        return 0, Place(place.total * self.samples * self.batch_size, runs)


@lru_cache(maxsize=256)
def _place_of(segments: tuple[Segment, ...], rank: int, ranks: int) -> tuple[int, Place]:
    """Return how many tokens of consecutive ``segments`` a rank has, and their place in one process."""
    layout = SequenceLayout(segments, ranks)
    size = sum(segment.size(rank, ranks) for segment in layout.segments)
    total = sum(segment.total for segment in layout.segments)
    return size, Place(total, tuple(layout.runs(rank)))


# A call asks for each product. The places of its tokens are computed once.
_known_call = lru_cache(maxsize=64)(OneProcess)


def one_process_of(module: nn.Module, samples: int = 1) -> OneProcess:
    """Return what one process would compute in place of the current call of ``module``.

    ``samples`` is the number of samples of the call on all ranks.
    """
    current = segments_under_way(module)
    batch = ranks_sharing_samples(module)
    index, size = 0, 1
    if batch is not None:
        index, size = batch.index, batch.size
    of_rank = max(1, samples // size)
    if current is None:
        return _known_call(batch_index=index, batch_size=size, samples=of_rank)
    mesh, segments = current
    return _known_call(segments, mesh.rank, mesh.ranks, index, size, mesh.ulysses.size, of_rank)
