"""Infer the sequence of a tensor from its length. Pure values: no torch.distributed, no tensors.

What a mode knows are the sequences that were sharded through it, or said to be replicated. A tensor is of one of them,
or of several that were concatenated in the order in which they are known, adjacent or not: 2 ** n - 1 candidates.

**When a length decides.** Two candidates conflict if they have as many tokens on some rank, but not on all, or not in
all. If the one that fits on this rank conflicts with another one, that is an error; and because the test looks at all
ranks, it is an error on every rank, whichever candidate each of them found. Candidates that are as long on every rank
differ in their order only, which matters to a mask and to ``is_causal``.

**What it costs.** The sums of all choices of the first n lengths are the bits of one integer, which takes one shift for
each length, up to the length that is looked for. From these only choices that sum to that length are followed: n steps
for each. On every rank these are compared one by one, and mostly there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice

from para_core.distributed.layout import Segment, SequenceLayout, even_layout

# Candidates of one length that are compared one by one before it is an error.
_MAX_COMPARED = 4096
# Sequences of which all concatenations are compared where lengths are symbolic.
_MAX_SYMBOLIC = 8
# Sequences of which an error lists all concatenations.
_MAX_LISTED = 3


@lru_cache(maxsize=1024)
def sequence_of_length(
    held: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """Return the segment, or the concatenation of segments, of which ``rank`` holds ``held`` tokens.

    Args:
        segments: what is known, in the order in which it became known; at least one.
        kind: what the tensor is, for messages.
        ordered: whether it matters where in the sequence a token is.

    Raises:
        ValueError: no candidate fits; or more than one does, on this rank or on another one.
    """
    choice = next(_choices([segment.size(rank, ranks) for segment in segments], held), None)
    if choice is None:
        raise _fits_nothing(held, segments, rank, ranks, kind)
    fitting = SequenceLayout(tuple([segments[i] for i in choice]), ranks)
    return _checked(fitting, _rivals(fitting, choice, segments, ordered, kind), held, kind, ordered)


def sequence_of_symbolic_length(
    held: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """:func:`sequence_of_length` under ``torch.compile``: lengths are compared, but never hashed or shifted by.

    Raises:
        ValueError: also if there are more sequences than can be compared so.
    """
    if len(segments) > _MAX_SYMBOLIC:
        raise ValueError(
            f"{len(segments)} sequences were sharded through this mode, and inside a compiled function at most "
            f"{_MAX_SYMBOLIC} are told apart by their lengths. Say which one {kind} is of with "
            "cp.using(SequenceLayout(...))."
        )
    candidates = _concatenations(segments, ranks)
    fitting = next((layout for layout in candidates if layout.size(rank) == held), None)
    if fitting is None:
        raise _fits_nothing(held, segments, rank, ranks, kind)
    return _checked(fitting, [other for other in candidates if other is not fitting], held, kind, ordered)


def layout_of_total(total: int, segments: tuple[Segment, ...], ranks: int, *, kind: str) -> SequenceLayout:
    """Return the layout of ``total`` tokens: that of the segment or concatenation of this length, or equal parts if
    there is none.

    Raises:
        ValueError: several have as many, or their order is not known; or there are more segments than can be compared.
    """
    if len(segments) > _MAX_SYMBOLIC:
        raise ValueError(
            f"{len(segments)} sequences were sharded through this mode, and at most {_MAX_SYMBOLIC} are told apart by "
            f"the {kind} "
            "length of a mask. Say which one it is for: cp.shard(block_mask, sequence=cp.sequence(total))."
        )
    layouts = [layout for layout in _concatenations(segments, ranks) if layout.total == total]
    if not layouts:
        return even_layout(total, ranks)
    if len(layouts) > 1 or len(layouts[0].segments) > 1:
        raise ValueError(
            f"{len(layouts)} sequences or concatenations that were sharded through this mode have the {total} {kind} "
            "tokens of "
            "the mask, and it matters in which order tokens are. Say it: cp.shard(block_mask, "
            "sequence=SequenceLayout(...))."
        )
    return layouts[0]


def _checked(
    fitting: SequenceLayout, others: Iterable[SequenceLayout], held: int, kind: str, ordered: bool
) -> SequenceLayout:
    for other in others:
        alike = [own == theirs for own, theirs in zip(fitting.sizes(), other.sizes(), strict=True)]
        # As many tokens on every rank are another sequence still, if one of the two counts replicated tokens once.
        if any(alike) and not (all(alike) and fitting.total == other.total):
            raise ValueError(
                f"{kind} has {held} tokens on this rank, and a sequence of {fitting.total} or of {other.total} would "
                "fit on some rank. Say which with cp.using(cp.sequence(total))."
            )
        if ordered and all(alike):
            raise _order_matters(fitting, kind)
    if ordered and len(fitting.segments) > 1:
        raise _order_matters(fitting, kind)
    if len(fitting.segments) > 1 and fitting.replicated:
        raise ValueError(
            f"{kind} of {fitting.total} tokens holds replicated ones, and they may be first or last. Say it with "
            "cp.using(SequenceLayout((Segment(..., replicated=True), Segment(...)), ranks))."
        )
    return fitting


# Messages are written only for an error: they would make lengths constants of a graph.


def _order_matters(fitting: SequenceLayout, kind: str) -> ValueError:
    return ValueError(
        f"{kind} of {fitting.total} tokens was put together in one of several orders, and a mask or is_causal "
        "needs to know which. Say it with cp.using(SequenceLayout(...))."
    )


def _fits_nothing(held: int, segments: tuple[Segment, ...], rank: int, ranks: int, kind: str) -> ValueError:
    few = len(segments) <= _MAX_LISTED
    listed = _concatenations(segments, ranks) if few else [SequenceLayout((segment,), ranks) for segment in segments]
    candidates = ", ".join([f"{layout.size(rank)} of {layout.total}" for layout in listed])
    return ValueError(
        f"{kind} has {held} tokens on this rank, which fits nothing that was sharded with cp.shard here ({candidates}"
        f"{'' if few else ', and concatenations of these'}). "
        "Shard it with cp.shard too, or say who holds what with cp.using(SequenceLayout(...))."
    )


def _concatenations(segments: tuple[Segment, ...], ranks: int) -> list[SequenceLayout]:
    """Each segment alone, and each choice of several in their order."""
    chosen: list[tuple[Segment, ...]] = [()]
    for segment in segments:
        chosen = chosen + [(*before, segment) for before in chosen]
    return [SequenceLayout(choice, ranks) for choice in chosen if choice]


def _rivals(
    fitting: SequenceLayout, fitting_choice: tuple[int, ...], segments: tuple[Segment, ...], ordered: bool, kind: str
) -> Iterator[SequenceLayout]:
    """Every other candidate that is as long as ``found`` on some rank."""
    # Ranks on which every segment is as long tell the same.
    columns = {
        tuple([segment.size(rank, fitting.ranks) for segment in segments]): rank for rank in range(fitting.ranks)
    }
    if len(columns) == 1 and not ordered and not any(segment.replicated for segment in segments):
        return  # what is as long on one rank is as long on all
    choices = chain.from_iterable(_choices(sizes, fitting.size(rank)) for sizes, rank in columns.items())
    for choice in islice(choices, _MAX_COMPARED):
        if choice != fitting_choice:
            yield SequenceLayout(tuple([segments[i] for i in choice]), fitting.ranks)
    if next(choices, None) is not None:
        raise ValueError(
            f"{kind} of {fitting.total} tokens fits more than {_MAX_COMPARED} concatenations of the {len(segments)} "
            "sequences that "
            "were sharded through this mode. Say which with cp.using(SequenceLayout(...))."
        )


def _choices(sizes: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield the indices of each nonempty choice of ``sizes`` that sums to ``total``. The latest index counts most."""
    up_to = (1 << total + 1) - 1
    # Of none, the first, the first two, … of ``sizes``: bit i is set if a choice sums to i.
    sums = list(accumulate(sizes, lambda sums, size: sums | (sums << size & up_to if size <= total else 0), initial=1))
    # What is yet to be chosen among the first so many, what that must sum to, and what was chosen after these.
    open_: list[tuple[int, int, tuple[int, ...]]] = [(len(sizes), total, ())]
    while open_:
        first, left, chosen = open_.pop()
        if not sums[first] >> left & 1:
            continue
        if first == 0:
            if chosen:
                yield chosen
            continue
        if sizes[first - 1] <= left:
            open_.append((first - 1, left - sizes[first - 1], (first - 1, *chosen)))
        open_.append((first - 1, left, chosen))
