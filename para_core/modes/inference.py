"""Infer which sequence a tensor holds from its length on this rank. Pure arithmetic, without tensors or
communication.

A mode knows the sequences that were sharded through it or declared replicated. A tensor holds one of these n
sequences, or a concatenation of some of them in the order in which they were sharded or declared: 2 ** n - 1
candidates.

**Ambiguity.** Two candidates conflict if their lengths are equal on some rank, but differ on another rank or
in total. If the candidate that fits on this rank conflicts with another candidate, ValueError is raised. The
lengths on all ranks are compared, so every rank raises, even if different candidates fit on different ranks.
Candidates with equal lengths on every rank and equal totals differ only in their order, which matters for a
mask and for ``is_causal``.

**Cost.** For each k, the bits of one integer tell which sums a choice among the first k lengths can have.
This integer is computed from that of k - 1 with one shift. The search then only follows choices that have the
wanted sum, usually a single choice, with n steps for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice

from para_core.layout.sequence import Segment, SequenceLayout, even_layout

# Maximum number of candidates that are compared with the fitting one, all of which have its length on some
# rank. If there are more, ValueError is raised.
_MAX_COMPARED = 4096
# Maximum number of sequences whose 2 ** n - 1 concatenations are all listed, for symbolic lengths or for a
# BlockMask.
_MAX_SYMBOLIC = 8
# Maximum number of sequences whose concatenations are all listed in an error message.
_MAX_LISTED = 3


@lru_cache(maxsize=1024)
def sequence_of_length(
    held: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """Return the layout of the segment, or concatenation of segments, whose part on ``rank`` has ``held``
    tokens.

    Args:
        segments: The segments that were sharded through the mode or declared replicated, in the order of
            these calls; at least one.
        kind: The name of the tensor in error messages.
        ordered: Whether the result of attention depends on the order of tokens, as with a mask or
            ``is_causal``.

    Raises:
        ValueError: No segment or concatenation (*candidate*) has ``held`` tokens on ``rank``; or the first
            that has (the *match*) is ambiguous: it conflicts with another candidate (see the module
            docstring); it is a concatenation with a replicated segment, which may be first or last; with
            ``ordered``, it is a concatenation or another candidate has the same length on every rank; or on
            some rank more than 4096 candidates are as long as the match, which are too many to compare.
    """
    choice = next(_choices([segment.size(rank, ranks) for segment in segments], held), None)
    if choice is None:
        raise _fits_nothing(held, segments, rank, ranks, kind)
    fitting = SequenceLayout(tuple([segments[i] for i in choice]), ranks)
    return _check_unambiguous(fitting, _rivals(fitting, choice, segments, ordered, kind), held, kind, ordered)


def sequence_of_symbolic_length(
    held: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """Return what :func:`sequence_of_length` returns, for symbolic lengths, which can be compared but not
    hashed. Also raise ``ValueError`` for more than 8 segments, because all their concatenations are compared.
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
    return _check_unambiguous(
        fitting, [other for other in candidates if other is not fitting], held, kind, ordered
    )


def layout_of_total(total: int, segments: tuple[Segment, ...], ranks: int, *, kind: str) -> SequenceLayout:
    """Return the layout of the segment that has ``total`` tokens over all ranks. If neither a segment nor a
    concatenation of segments has this length, return equal parts.

    Raises:
        ValueError: Several segments or concatenations have ``total`` tokens; or a concatenation has, so that
            the order of its segments is unknown; or there are more than 8 segments.
    """
    if len(segments) > _MAX_SYMBOLIC:
        raise ValueError(
            f"{len(segments)} sequences were sharded through this mode, and at most {_MAX_SYMBOLIC} are told apart by "
            f"the {kind} length of a mask. Say which one it is for: cp.shard(block_mask, sequence=cp.sequence(total))."
        )
    layouts = [layout for layout in _concatenations(segments, ranks) if layout.total == total]
    if not layouts:
        return even_layout(total, ranks)
    if len(layouts) > 1 or len(layouts[0].segments) > 1:
        raise ValueError(
            f"{len(layouts)} sequences or concatenations that were sharded through this mode have the {total} {kind} "
            "tokens of the mask, and it matters in which order tokens are. Say it: cp.shard(block_mask, "
            "sequence=SequenceLayout(...))."
        )
    return layouts[0]


def _check_unambiguous(
    fitting: SequenceLayout, others: Iterable[SequenceLayout], held: int, kind: str, ordered: bool
) -> SequenceLayout:
    """Return ``fitting``, the layout of a query or key with ``held`` tokens on this rank.

    Raises:
        ValueError: One of ``others`` would fit too, or the order of the segments matters and is not known.
    """
    for other in others:
        pairs = zip(fitting.sizes(), other.sizes(), strict=True)
        same_length = [size == other_size for size, other_size in pairs]
        # Compare totals too: they may differ if all lengths are equal, because a total counts replicated
        # tokens once.
        if any(same_length) and not (all(same_length) and fitting.total == other.total):
            raise ValueError(
                f"{kind} has {held} tokens on this rank, and a sequence of {fitting.total} or of {other.total} would "
                "fit on some rank. Say which with cp.using(cp.sequence(total))."
            )
        if ordered and all(same_length):
            raise _order_matters(fitting, kind)
    if ordered and len(fitting.segments) > 1:
        raise _order_matters(fitting, kind)
    if len(fitting.segments) > 1 and fitting.replicated:
        raise ValueError(
            f"{kind} of {fitting.total} tokens holds replicated ones, and they may be first or last. Say it with "
            "cp.using(SequenceLayout((Segment(..., replicated=True), Segment(...)), ranks))."
        )
    return fitting


# Messages are formatted in functions of their own, only when an error is raised, because formatting a
# symbolic length makes this length a constant of the graph.


def _order_matters(fitting: SequenceLayout, kind: str) -> ValueError:
    return ValueError(
        f"{kind} of {fitting.total} tokens was put together in one of several orders, and a mask or is_causal "
        "needs to know which. Say it with cp.using(SequenceLayout(...))."
    )


def _fits_nothing(held: int, segments: tuple[Segment, ...], rank: int, ranks: int, kind: str) -> ValueError:
    if len(segments) <= _MAX_LISTED:
        layouts = _concatenations(segments, ranks)
        further = ""
    else:
        layouts = [SequenceLayout((segment,), ranks) for segment in segments]
        further = ", and concatenations of these"
    candidates = ", ".join([f"{layout.size(rank)} of {layout.total}" for layout in layouts])
    return ValueError(
        f"{kind} has {held} tokens on this rank, which fits nothing that was sharded with cp.shard here ({candidates}"
        f"{further}). "
        "Shard it with cp.shard too, or say who holds what with cp.using(SequenceLayout(...))."
    )


def _concatenations(segments: tuple[Segment, ...], ranks: int) -> list[SequenceLayout]:
    """Return the layout of each nonempty choice of ``segments``, concatenated in the given order."""
    chosen: list[tuple[Segment, ...]] = [()]
    for segment in segments:
        chosen = chosen + [(*before, segment) for before in chosen]
    return [SequenceLayout(choice, ranks) for choice in chosen if choice]


def _rivals(
    fitting: SequenceLayout,
    fitting_choice: tuple[int, ...],
    segments: tuple[Segment, ...],
    ordered: bool,
    kind: str,
) -> Iterator[SequenceLayout]:
    """Yield the layout of each other choice of ``segments`` that has the same length as ``fitting`` on some
    rank.

    ``fitting_choice`` are the indices of the segments of ``fitting``. A layout may be yielded several times.
    Nothing is yielded if choices cannot conflict: the order of tokens does not matter, all ranks hold equal
    lengths, and no segment is replicated. Raise ``ValueError`` for more than 4096 choices.
    """
    # Ranks with the same lengths of all segments have the same candidates. Keep one rank for each tuple of
    # lengths.
    columns = {
        tuple([segment.size(rank, fitting.ranks) for segment in segments]): rank
        for rank in range(fitting.ranks)
    }
    if len(columns) == 1 and not ordered and not any(segment.replicated for segment in segments):
        return  # All ranks hold equally long parts, so two layouts have equal lengths on every rank or on no rank.
    choices = chain.from_iterable(_choices(sizes, fitting.size(rank)) for sizes, rank in columns.items())
    for choice in islice(choices, _MAX_COMPARED):
        if choice != fitting_choice:
            yield SequenceLayout(tuple([segments[i] for i in choice]), fitting.ranks)
    if next(choices, None) is not None:
        raise ValueError(
            f"{kind} of {fitting.total} tokens fits more than {_MAX_COMPARED} concatenations of the {len(segments)} "
            "sequences that were sharded through this mode. Say which with cp.using(SequenceLayout(...))."
        )


def _choices(sizes: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield each nonempty subset of ``sizes`` with the sum ``total``, as a tuple of ascending indices.

    Subsets without the last size come first.
    """
    up_to = (1 << total + 1) - 1
    # Bit i of sums[k] is set if a subset of the first k sizes has the sum i.
    sums = [1]
    for size in sizes:
        with_size = 0
        if size <= total:
            with_size = sums[-1] << size & up_to
        sums.append(sums[-1] | with_size)
    # A stack of partly chosen subsets: (number k of leading sizes that are still undecided, the sum that must
    # be chosen among the first k sizes, the chosen indices from k on).
    open_: list[tuple[int, int, tuple[int, ...]]] = [(len(sizes), total, ())]
    while open_:
        first, remaining, chosen = open_.pop()
        if not sums[first] >> remaining & 1:
            continue
        if first == 0:
            if chosen:
                yield chosen
            continue
        if sizes[first - 1] <= remaining:
            open_.append((first - 1, remaining - sizes[first - 1], (first - 1, *chosen)))
        open_.append((first - 1, remaining, chosen))
