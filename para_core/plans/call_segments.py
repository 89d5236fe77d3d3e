"""The segments of one call of a model with a plan: which tokens of each a rank holds, and how many.

This is the base class of :mod:`.split_rules` and :mod:`.gathered_outputs`. It reads no rules except the sizes
of a :class:`~para_core.plans.plan.Split` with ``together``. Tests: tests/plans/test_exactness.py, and
tests/plans/test_plan.py for lengths that do not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.layout.tokens import GatherSizes, gather_sizes, gather_tokens, shard_tokens
from para_core.plans.plan import Split

# Maximum number of layouts whose sizes are kept. A full table is emptied.
_MOST_KNOWN = 256


class SegmentsOfCall:
    """The segments of one call of a model at a time, on the ranks of ``mesh``.

    PipeFusion overrides :meth:`new_segment`, :meth:`fewest_on_a_rank`, :meth:`put_together` and
    :meth:`with_equal_bits` for a patch of the tokens (:mod:`para_core.weights.patch_hooks`), so the rules
    must make the segments that may be sharded, and reach other ranks, through these. Only a rule with
    ``together`` makes its segment otherwise, and :func:`~para_core.weights.patch_plan.patch_plan` refuses it.

    :attr:`segments` holds, by name, the segments that the rules of the current call have sharded or
    replicated so far, to which later rules refer. The caller clears it after each call. ``coarse`` are the
    :func:`~para_core.plans.plan_queries.coarse_segments`.
    """

    def __init__(self, mesh: SequenceMesh, coarse: Collection[str] = ()) -> None:
        self.mesh = mesh
        self._coarse = coarse
        # A dict, because Dynamo 2.13 loses an attribute that is set before and after torch.cond, which a
        # cache adds.
        self.segments: dict[str, Segment] = {}
        # In eager code, the numbers of tokens that gather_sizes() returns for a layout.
        self._known_sizes: dict[SequenceLayout, tuple[GatherSizes, ...]] = {}

    def new_segment(self, name: str, total: int) -> Segment:
        """Return a segment of ``total`` tokens: sharded, or replicated if there are too few tokens for every rank."""
        # Branch on the comparison instead of passing it as ``replicated``, because for symbolic lengths it is
        # not a bool.
        if total < self.mesh.ranks * self.fewest_on_a_rank(name):
            return Segment(name, total, replicated=True)
        return Segment(name, total)

    def fewest_on_a_rank(self, name: str) -> int:
        """Return the least number of tokens per rank with which a segment is sharded: 1 for rows or frames,
        else 2.

        Hugging Face transformers treat a single token as a decoding step, and pass ``is_causal=False``.
        """
        return 1 if name in self._coarse else 2

    def _note(self, segment: Segment, dim: int, name: str) -> None:
        """Note ``segment`` for later rules, unless it is known. Raise ``ValueError`` if it then had another
        length.

        ``name`` and ``dim`` say where its length was read.
        """
        if segment.name not in self.segments:
            self.segments[segment.name] = segment
        expected = self.segments[segment.name].total
        if expected != segment.total:
            raise ValueError(
                f"{name} has {segment.total} tokens in dim {dim}; expected {expected}, as the other {segment.name} "
                "inputs."
            )

    def _segment_of_groups(self, value: Tensor, split: Split) -> Segment:
        """Return the segment of a tensor in which the tokens of each entry of a dim, such as a frame, stay
        together.

        A replicated segment has groups as well, by which later rules know a tensor with an entry for each.
        Raise ``ValueError`` if ``value`` lacks one of the dims ``split.together``.
        """
        if not all(-value.ndim <= dim < value.ndim for dim in split.together):
            raise ValueError(
                f"a tensor of {split.segment} has {value.ndim} dims {list(value.shape)}; the plan counts tokens along "
                f"the dims {split.dim} and {split.together}."
            )
        entries = value.shape[split.dim]
        tokens = prod([value.shape[dim] for dim in split.together])
        name = split.segment or ""
        if entries < self.mesh.ranks:
            return Segment(name, entries * tokens, replicated=True, together=tokens)
        return Segment(name, entries * tokens, together=tokens)

    def _layout_of(self, names: Sequence[str], total: int) -> SequenceLayout:
        """Return the layout of a sequence of ``total`` tokens that consists of the segments ``names``, in
        this order. One of them may be unknown in this call so far. It counts as replicated, with the
        remaining tokens.

        Raises:
            ValueError: Several are unknown, and another one is sharded.
        """
        segments = self.segments
        unknown = [name for name in names if name not in segments]
        sharded = [name for name in names if name in segments and not segments[name].replicated]
        if len(unknown) > 1 and sharded:
            raise ValueError(
                f"the plan says that {total} tokens are those of {list(names)}, and this call has split or replicated "
                f"none of {unknown}, whose lengths are therefore unknown; expected at most one such segment. Write a "
                "Replicate for the others."
            )
        rest = total - sum([segments[name].total for name in names if name in segments])
        parts = []
        for name in names:
            if name in segments:
                parts.append(segments[name])
            else:
                parts.append(Segment(name, rest, replicated=True))
        return SequenceLayout(tuple(parts), self.mesh.ranks)

    def _layout_with_prefix(self, value: Tensor, dim: int, segment: Segment, tokens: int) -> SequenceLayout:
        """Return the layout of ``value`` along ``dim``: a replicated prefix, followed by ``tokens`` tokens of
        ``segment``, which are all of them or this rank's part.
        """
        rest = value.shape[dim] - tokens
        return SequenceLayout((Segment("rest", rest, replicated=True), segment), self.mesh.ranks)

    def _range_on_rank(
        self, which: Literal["first", "last"], number: int, segment: Segment
    ) -> tuple[int, int]:
        """Return which of the ``number`` first or last tokens of ``segment`` this rank holds, as a range of them."""
        # No rule makes a balanced segment, so a rank holds a single run.
        ((start, length),) = segment.runs(self.mesh.rank, self.mesh.ranks)
        if which == "last":
            start = start - (segment.total - number)
        return min(max(start, 0), number), min(max(start + length, 0), number)

    def put_together(self, part: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        """Return the tokens of all ranks along ``dim``, given those of this rank in ``layout``. Collective."""
        if torch.compiler.is_compiling():
            return gather_tokens(part, dim, layout, self.mesh)
        sizes = self._known_sizes.get(layout)
        if sizes is None:
            if len(self._known_sizes) >= _MOST_KNOWN:
                self._known_sizes.clear()
            sizes = self._known_sizes[layout] = gather_sizes(layout, self.mesh)
        return gather_tokens(part, dim, layout, self.mesh, sizes)

    def _shard_known(self, value: Tensor, dim: int, segment: Segment) -> Tensor:
        """Return this rank's part of ``value`` along ``dim``, which holds the tokens or the groups of
        ``segment``.

        Raises:
            ValueError: ``dim`` has another length.
        """
        by_length = {segment.total: segment, segment.total // segment.together: groups_of(segment)}
        if value.shape[dim] not in by_length:
            raise ValueError(
                f"dim {dim} of a tensor {list(value.shape)} that accompanies {segment.name} has {value.shape[dim]} "
                f"entries; expected {segment.total}, or {segment.total // segment.together} with "
                f"{segment.together} tokens each."
            )
        if segment.replicated:
            return value
        layout = SequenceLayout((by_length[value.shape[dim]],), self.mesh.ranks)
        return shard_tokens(value, dim, layout, self.mesh)

    def with_equal_bits(self, value: Tensor, dim: int, segment: Segment) -> Tensor:
        """Return ``value``, all tokens or groups of a replicated ``segment`` along ``dim``, with the same
        bits on every rank.

        If other segments are sharded, ranks multiply matrices with different numbers of rows, and the last
        bit may differ. Each token is therefore taken from the rank that would hold it if the segment were
        sharded. Collective, unless nothing is sharded.
        """
        if all(other.replicated for other in self.segments.values()):
            return value
        layout = SequenceLayout((Segment(segment.name, value.shape[dim]),), self.mesh.ranks)
        return gather_tokens(shard_tokens(value, dim, layout, self.mesh), dim, layout, self.mesh)

    def segment(self, name: str) -> Segment:
        """Return the segment ``name`` of the current call. Raise ``ValueError`` if no rule has defined it."""
        if name not in self.segments:
            raise ValueError(
                f"the plan refers to the segment {name!r}, which this call has not sharded: the call did not use the "
                "module or parameter at which the plan shards it, or uses it later. Segments so far: "
                f"{sorted(self.segments) or 'none'}. Shard it at something that every call uses, such as the embedding "
                "of its tokens."
            )
        return self.segments[name]


def groups_of(segment: Segment) -> Segment:
    """Return a segment with an entry for each group of ``segment``, whose tokens stay together; itself if none do."""
    if segment.together == 1:
        return segment
    return Segment(segment.name, segment.total // segment.together, replicated=segment.replicated)
