"""Apply the rule :class:`~para_core.plans.plan.Split` to a tensor: return this rank's part of its tokens.

The other rules are in :mod:`.apply_rules`, whose ``RuleExecutor`` derives from this. Splitting needs no
communication. Tests: tests/plans/test_exactness.py, tests/adapters/propose/test_structures.py for rare fields
of a rule, and the table ``REFUSED`` of tests/plans/test_plan.py for tensors that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Run, Segment, SequenceLayout
from para_core.layout.tokens import copy_runs, shard_tokens
from para_core.plans.call_segments import SegmentsOfCall
from para_core.plans.plan import Split

# Maximum number of known cuts of one plan. A full table is emptied.
_MOST_KNOWN = 256


# Called with a tensor, and the names of the segments whose tokens it holds.
OnTokens = Callable[[Tensor, tuple[str, ...]], None]


class _KnownCut(NamedTuple):
    """A segment of a certain name and number of tokens, and the runs of them that this rank holds.

    Each rule of this segment that is plain (:attr:`Split.is_plain`) cuts a tensor with so many entries by it.
    """

    segment: Segment
    runs: tuple[Run, ...]


class SplitRules(SegmentsOfCall):
    """The part of a :class:`~para_core.plans.apply_rules.RuleExecutor` that splits tensors."""

    def __init__(self, mesh: SequenceMesh, coarse: Collection[str] = ()) -> None:
        super().__init__(mesh, coarse)
        # In eager code, the sharding of tensors that a plain Split cuts, by segment name and number of
        # tokens.
        self._known_cuts: dict[tuple[str, int], _KnownCut] = {}
        self._on_tokens: OnTokens | None = None

    @contextmanager
    def report_tokens(self, on_tokens: OnTokens) -> Iterator[None]:
        """Call ``on_tokens`` with each tensor that holds tokens of this rank after a rule, and the segments,
        which are empty if the tensor also holds something else. In eager code, inside the ``with`` block.
        """
        self._on_tokens = on_tokens
        try:
            yield
        finally:
            self._on_tokens = None

    def report_replicated(self, value: Tensor, segment_name: str) -> None:
        """Report ``value``, which holds all tokens of a segment: :meth:`report_tokens`."""
        if not torch.compiler.is_compiling() and self._on_tokens is not None:
            self._on_tokens(value, (segment_name,))

    def split_known(self, value: Tensor, split: Split, name: str) -> Tensor | None:
        """Return this rank's part of ``value`` if ``split`` is plain, :meth:`_split_eagerly` has split as
        many tokens of its segment before, and the segment is new in this call or was noted so; else None.

        It does what :meth:`split` does, with fewer Python calls: change both.
        """
        if self._on_tokens is not None or not split.is_plain:
            return None
        if split.ndim is not None and value.ndim != split.ndim:
            return None
        if not -value.ndim <= split.dim < value.ndim:
            return None
        segment_name = split.segment or split.like or name
        known_cut = self._known_cuts.get((segment_name, value.shape[split.dim]))
        if known_cut is None:
            return None
        segment = known_cut.segment
        if segment.total == 1 and split.segment is None:
            # One entry for all tokens, or that of one token: split() tells.
            return None
        noted = self.segments.get(segment_name)
        if noted is None and (split.segment is not None or not segment.replicated):
            self.segments[segment_name] = segment
        elif noted is not None and noted != segment:
            return None
        if segment.replicated:
            return value
        if len(known_cut.runs) > 1:
            return copy_runs(value, split.dim, known_cut.runs)
        # This is what copy_runs does for one run, with a Python call less for each input of each step.
        start, length = known_cut.runs[0]
        return value.narrow(split.dim, start, length).clone()

    def split(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Return this rank's part of ``value``, an argument or output called ``name``, or ``value`` itself if
        its tokens are replicated. The segment is noted for later rules of this call.

        Raises:
            ValueError: ``value`` has another shape than the rule or an earlier split of its segment says, or
                the segment was not split before although the rule needs that.
        """
        part = self._split(value, split, name)
        # Test is_compiling() first: every attribute that is read while tracing becomes a guard of the graph.
        if torch.compiler.is_compiling() or self._on_tokens is None:
            return part
        segment_name = split.segment or split.like or name
        segment = self.segments.get(segment_name)
        if part is not value or (segment is not None and segment.replicated):
            has_more = (
                split.then_replicated or split.after_replicated or split.after or split.runs or split.per != 1
            )
            self._on_tokens(part, () if has_more else (segment_name,))
        return part

    def _split(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Do what :meth:`split` does, without a report."""
        if split.ndim is not None and value.ndim != split.ndim:
            if split.segment is None and value.ndim < split.ndim:
                return value
            if split.like is None:
                raise ValueError(
                    f"{name} has {value.ndim} dims {list(value.shape)}; the plan splits a tensor of {split.ndim}."
                )
        if not -value.ndim <= split.dim < value.ndim:
            raise ValueError(
                f"{name} has {value.ndim} dims {list(value.shape)}; the plan splits it along dim {split.dim}."
            )
        if split.per != 1:
            return self._split_entries_of_tokens(value, split, name)
        if split.runs:
            return self._split_repeated_tokens(value, split, name)
        if split.only is not None:
            segment = self.segment(split.like or "")
            if value.shape[split.dim] > segment.total:
                raise ValueError(
                    f"{name} has {value.shape[split.dim]} entries along dim {split.dim}; expected at most "
                    f"{segment.total}, one for each of the {split.only} {segment.name} tokens."
                )
            start, stop = self._range_on_rank(split.only, value.shape[split.dim], segment)
            return value.narrow(split.dim, start, stop - start)
        if split.then_replicated or split.after_replicated:
            return self._split_tokens_and_others(value, split, name)
        if split.together:
            segment = self._segment_of_groups(value, split)
            self._note(segment, split.dim, name)
            if segment.replicated:
                return value
            return self._shard_known(value, split.dim, segment)
        return self._split_tokens(value, split, name)

    def _split_tokens_and_others(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Split the tokens of a dim that also has other entries, before or after them, which are replicated."""
        segment = self.segment(split.segment or split.like or "")
        total = segment.total
        if value.shape[split.dim] < total:
            raise ValueError(
                f"{name} has {value.shape[split.dim]} entries along dim {split.dim}; expected at least {total}, "
                f"one for each {segment.name} token, and others."
            )
        if split.after_replicated:
            layout = self._layout_with_prefix(value, split.dim, segment, total)
            return shard_tokens(value, split.dim, layout, self.mesh)
        tokens, rest = value.split([total, value.shape[split.dim] - total], dim=split.dim)
        # per was applied before, and all else that a rule may say excludes then_replicated.
        part = self._split_tokens(tokens, replace(split, then_replicated=False), name)
        return torch.cat([part, rest], dim=split.dim)

    def _split_entries_of_tokens(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Split a dim that has ``split.per`` entries for each entry of the segment."""
        dim = split.dim % value.ndim
        if split.per is not None:
            divisor = split.per
            sizes = (-1, split.per)
        else:
            divisor = self.segment(split.like or "").total
            sizes = (divisor, -1)
        if divisor == 0 or value.shape[dim] % divisor != 0:
            raise ValueError(
                f"{name} has {value.shape[dim]} entries along dim {dim}; expected a multiple of {divisor}, as the plan "
                f"splits it with per={split.per}."
            )
        grouped = torch.unflatten(value, dim, sizes)
        return self.split(grouped, replace(split, dim=dim, ndim=None, per=1), name).flatten(dim, dim + 1)

    def _split_repeated_tokens(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Split a dim that has all tokens of the segment several times in a row."""
        dim = split.dim % value.ndim
        segment = self.segment(split.like or "")
        if segment.total == 0 or value.shape[dim] % segment.total != 0:
            raise ValueError(
                f"{name} has {value.shape[dim]} entries along dim {dim}; expected a multiple of {segment.total}, the "
                f"number of {segment.name} tokens, which the plan says are repeated there."
            )
        grouped = torch.unflatten(value, dim, (-1, segment.total))
        part = self.split(grouped, replace(split, dim=dim + 1, ndim=None, runs=False), name)
        return part.flatten(dim, dim + 1)

    def _split_tokens(self, value: Tensor, split: Split, name: str) -> Tensor:
        """Split a dim with one entry per token of the segment, perhaps after the tokens of ``split.after``."""
        segment_name = split.segment or split.like or name
        noted = self.segments.get(segment_name)
        if split.segment is None and value.shape[split.dim] == 1:
            # One entry for all tokens.
            return value
        if noted is not None and split.after is None:
            if noted.together != 1:
                return self._shard_known(value, split.dim, noted)
            # A segment may be replicated by a rule, even if it has enough tokens.
            if noted.replicated and noted.total == value.shape[split.dim]:
                return value
        if split.after is None and not torch.compiler.is_compiling():
            return self._split_eagerly(value, split, name, segment_name)
        first: tuple[Segment, ...] = ()
        if split.after is not None:
            first = (self.segment(split.after),)
        total = value.shape[split.dim] - sum([segment.total for segment in first])
        if total < 0:
            raise ValueError(
                f"{name} has {value.shape[split.dim]} entries along dim {split.dim}; expected at least "
                f"{first[0].total}, the {split.after} tokens, and then those of {segment_name}."
            )
        segment = self.new_segment(segment_name, total)
        if noted is not None or split.segment is not None or not segment.replicated:
            self._note(segment, split.dim, name)
        if segment.replicated:
            return value
        return shard_tokens(value, split.dim, SequenceLayout((*first, segment), self.mesh.ranks), self.mesh)

    def _split_eagerly(self, value: Tensor, split: Split, name: str, segment_name: str) -> Tensor:
        """Return this rank's part of ``value``, all of whose tokens along ``split.dim`` are those of one
        segment.

        What the plan says about a number of tokens is looked up from the second call on.
        """
        total = value.shape[split.dim]
        known_cut = self._known_cuts.get((segment_name, total))
        if known_cut is None:
            segment = self.new_segment(segment_name, total)
            runs = SequenceLayout((segment,), self.mesh.ranks).runs(self.mesh.rank)
            if len(self._known_cuts) >= _MOST_KNOWN:
                self._known_cuts.clear()
            known_cut = self._known_cuts[segment_name, total] = _KnownCut(segment, runs)
        segment = known_cut.segment
        noted = self.segments.get(segment_name)
        is_noted = noted is not None or split.segment is not None or not segment.replicated
        if is_noted and (noted is None or noted.total != total):
            self._note(segment, split.dim, name)
        if segment.replicated:
            return value
        return copy_runs(value, split.dim, known_cut.runs)
