"""Infer which sequence a tensor holds from its length on this rank. Pure arithmetic, without tensors or
communication.

A mode knows the sequences that were sharded through it or declared replicated. A tensor holds one of them, or
all of them, concatenated in the order in which they were sharded or declared: these are the *candidates*. For
anything else, such as some of the sequences or another order, the user passes the layout.

**Ambiguity.** Two candidates conflict if their lengths are equal on some rank, but differ on another rank or
in total. If the candidate that fits on this rank conflicts with another candidate, ValueError is raised. The
lengths on all ranks are compared, so every rank raises, even if different candidates fit on different ranks.
Candidates with equal lengths on every rank and equal totals differ only in their order, which matters for a
mask and for ``is_causal``.

Only :mod:`.layout_mode` calls this. Which sequences a mode knows is noted in :mod:`.sharding_mode`. Tests:
tests/modes/test_inference.py.
"""

from __future__ import annotations

from functools import lru_cache

from para_core.layout.sequence import Segment, SequenceLayout, even_layout

# Maximum number of sequences that are listed in an error message.
_MAX_LISTED = 8


@lru_cache(maxsize=1024)
def sequence_of_length(
    num_tokens: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """Return the layout of the candidate whose part on ``rank`` has ``num_tokens`` tokens.

    Args:
        segments: The segments that were sharded through the mode or declared replicated, in the order of
            these calls; at least one.
        kind: The name of the tensor in error messages.
        ordered: Whether the result of attention depends on the order of tokens, as with a mask or
            ``is_causal``.

    Raises:
        ValueError: No candidate has ``num_tokens`` tokens on ``rank``; or the first that has (the *match*) is
            ambiguous: it conflicts with another candidate (see the module docstring); it is a concatenation
            with a replicated segment, which may be first or last; or with ``ordered``, it is a concatenation
            or another candidate has the same length on every rank.
    """
    return sequence_of_symbolic_length(num_tokens, segments, rank, ranks, kind=kind, ordered=ordered)


def sequence_of_symbolic_length(
    num_tokens: int, segments: tuple[Segment, ...], rank: int, ranks: int, *, kind: str, ordered: bool
) -> SequenceLayout:
    """Return what :func:`sequence_of_length` returns, for symbolic lengths, which can be compared but not
    hashed.
    """
    candidates = _candidates(segments, ranks)
    fitting = next((layout for layout in candidates if layout.size(rank) == num_tokens), None)
    if fitting is None:
        raise _no_fit_error(num_tokens, candidates, rank, kind)
    for other in candidates:
        if other is not fitting:
            _check_rival(fitting, other, num_tokens, kind, ordered)
    if len(fitting.segments) > 1:
        if ordered:
            raise _order_error(fitting, kind)
        if fitting.replicated:
            raise ValueError(
                f"{kind} of {fitting.total} tokens holds replicated ones, and they may be first or last. Say it with "
                "cp.using(SequenceLayout((Segment(..., replicated=True), Segment(...)), ranks))."
            )
    return fitting


def layout_of_total(total: int, segments: tuple[Segment, ...], ranks: int, *, kind: str) -> SequenceLayout:
    """Return the layout of the segment that has ``total`` tokens over all ranks. If neither a segment nor all
    of them together have this length, return equal parts.

    Raises:
        ValueError: Several candidates have ``total`` tokens; or only all segments together have, so that
            their order is unknown.
    """
    layouts = [layout for layout in _candidates(segments, ranks) if layout.total == total]
    if not layouts:
        return even_layout(total, ranks)
    if len(layouts) > 1 or len(layouts[0].segments) > 1:
        raise ValueError(
            f"{len(layouts)} sequences or concatenations that were sharded through this mode have the {total} {kind} "
            "tokens of the mask, and it matters in which order tokens are. Say it: cp.shard(block_mask, "
            "sequence=SequenceLayout(...))."
        )
    return layouts[0]


def _candidates(segments: tuple[Segment, ...], ranks: int) -> list[SequenceLayout]:
    """Return the layout of each segment, and that of all of them in order."""
    layouts = [SequenceLayout((segment,), ranks) for segment in segments]
    if len(segments) > 1:
        layouts.append(SequenceLayout(segments, ranks))
    return layouts


def _check_rival(
    fitting: SequenceLayout, other: SequenceLayout, num_tokens: int, kind: str, ordered: bool
) -> None:
    """Raise ``ValueError`` if ``other`` would fit as well as ``fitting``, the layout of a query or key with
    ``num_tokens`` tokens on this rank.
    """
    pairs = zip(fitting.sizes(), other.sizes(), strict=True)
    same_length = [size == other_size for size, other_size in pairs]
    # Compare totals too: they may differ if all lengths are equal, because a total counts replicated tokens
    # once.
    if any(same_length) and not (all(same_length) and fitting.total == other.total):
        raise ValueError(
            f"{kind} has {num_tokens} tokens on this rank, and a sequence of {fitting.total} or of {other.total} would "
            "fit on some rank. Say which with cp.using(cp.sequence(total))."
        )
    if ordered and all(same_length):
        raise _order_error(fitting, kind)


# Format a message only when its error is raised: formatting a symbolic length makes it a constant of the
# graph.


def _order_error(fitting: SequenceLayout, kind: str) -> ValueError:
    return ValueError(
        f"{kind} of {fitting.total} tokens was put together in one of several orders, and a mask or is_causal "
        "needs to know which. Say it with cp.using(SequenceLayout(...))."
    )


def _no_fit_error(num_tokens: int, candidates: list[SequenceLayout], rank: int, kind: str) -> ValueError:
    """Return the error that no candidate has ``num_tokens`` tokens on ``rank``; it lists this rank's part of each."""
    listed = ", ".join([f"{layout.size(rank)} of {layout.total}" for layout in candidates[:_MAX_LISTED]])
    if len(candidates) > _MAX_LISTED:
        listed = f"{listed}, …"
    return ValueError(
        f"{kind} has {num_tokens} tokens on this rank, which fits nothing that was sharded with cp.shard here, neither "
        f"one sequence nor all in the order of sharding ({listed}). Shard it with cp.shard too, or say who holds what: "
        "cp.using(SequenceLayout(...)), with a Segment for each sequence in it."
    )
