"""Apply the rules of a plan to tensors: shard them, gather them, or record how many tokens they hold. The
wrappers of modules, which call this code, are in :mod:`~para_core.plans.region`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.dataclass_fields import (
    change_field,
    fields_of,
    has_fields,
    leaves_of,
    like_sequence,
    with_fields,
)
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Run, Segment, SequenceLayout
from para_core.layout.tokens import copy_runs, shard_tokens
from para_core.modes.registry import mask_sharder
from para_core.plans.call_segments import SegmentsOfCall, groups_of
from para_core.plans.plan import (
    Count,
    CumulativeLengths,
    Entries,
    FirstTokens,
    Gather,
    LastTokens,
    Replicate,
    ShardRule,
    Split,
    SplitMask,
)

# Maximum number of known cuts, and of known gathers, of one plan. A full table is emptied.
_MOST_KNOWN = 256


class _KnownCut(NamedTuple):
    """The result of a plain :class:`Split` for one number of tokens: the segment, and the runs that this rank holds."""

    # The table's keys contain the id of the rule, so it must stay alive.
    split: Split
    name: str
    segment: Segment
    runs: tuple[Run, ...]


class _KnownGather(NamedTuple):
    """The result of a plain :class:`Gather` for one segment: the layout of the output along the dim ``dim``."""

    # The table's keys contain the id of the rule, so it must stay alive.
    gather: Gather
    dim: int
    layout: SequenceLayout


class RuleExecutor(SegmentsOfCall):
    """An executor of plan rules on the tensors of one model call at a time."""

    def __init__(self, mesh: SequenceMesh, coarse: Collection[str] = ()) -> None:
        super().__init__(mesh, coarse)
        # In eager code, the sharding of tensors that a plain Split cuts, by rule and number of tokens.
        self._known_cuts: dict[tuple[int, int], _KnownCut] = {}
        # In eager code, the layouts of outputs, by rule, segment, number of tokens or groups, and of dims.
        self._known_gathers: dict[tuple[int, Segment, int, int], _KnownGather] = {}
        # (Query layout, key layout, sharded mask) by block mask, because a model passes the same mask to
        # every block.
        self._masks: WeakKeyDictionary[BlockMask, tuple[SequenceLayout, SequenceLayout, BlockMask]]
        self._masks = WeakKeyDictionary()

    def arguments(
        self,
        cuts: Mapping[str, ShardRule],
        parameters: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module_name: str = "",
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``args`` and ``kwargs`` of a module call, with the rules ``cuts`` applied by parameter name,
        or by the path of a field of an argument, such as ``"video.x"``.

        Arguments and fields that are not passed, or are None, are skipped. ``parameters`` are the names of
        the positional parameters, in order. Raise ``TypeError`` or ``ValueError`` if an argument does not fit
        its rule.
        """
        positional = list(args)
        named = dict(kwargs)
        prefix = f"{module_name}." if module_name else ""
        is_traced = torch.compiler.is_compiling()
        for key, cut in cuts.items():
            name = prefix + key
            # Most rules split tensors of a known length. This saves Python calls for each.
            if not is_traced and isinstance(cut, Split) and isinstance(named.get(key), Tensor):
                part = self._split_known(named[key], cut, name)
                if part is not None:
                    named[key] = part
                    continue
            parameter, _, path = key.partition(".")
            if named.get(parameter) is not None:
                named[parameter] = self._cut_at(path, named[parameter], cut, name)
            elif parameter in parameters[: len(positional)]:
                index = parameters.index(parameter)
                if positional[index] is not None:
                    positional[index] = self._cut_at(path, positional[index], cut, name)
        return tuple(positional), named

    def _split_known(self, value: Tensor, split: Split, name: str) -> Tensor | None:
        """Return this rank's part of ``value`` if :meth:`_split_eagerly` has split as many tokens by this rule
        before, and its segment is known or new in this call; else None.
        """
        if split.ndim is not None and value.ndim != split.ndim:
            return None
        known = self._known_cuts.get((id(split), value.shape[split.dim]))
        if known is None or known.split is not split or known.name != (split.segment or split.like or name):
            return None
        segment = known.segment
        noted = self.segments.get(known.name)
        if noted is None and (split.segment is not None or not segment.replicated):
            self.segments[known.name] = segment
        elif noted is not None and noted != segment:
            return None
        if segment.replicated:
            return value
        if len(known.runs) > 1:
            return copy_runs(value, split.dim, known.runs)
        # This is what copy_runs does for one run, with a Python call less for each input of each step.
        start, length = known.runs[0]
        return value.narrow(split.dim, start, length).clone()

    def _cut_at(self, path: str, value: Any, cut: ShardRule, name: str) -> Any:
        """Return ``value`` with the rule ``cut`` applied to its field ``path``, or to itself if the path is empty."""
        if not path:
            return self.cut(value, cut, name)
        return change_field(value, path, partial(self.cut, cut=cut, name=name))

    def cut(self, value: Any, cut: ShardRule, name: str) -> Any:
        """Return ``value``, an argument or output called ``name``, with the rule ``cut`` applied to it, or to
        each entry of a list, tuple or dict that is not None, or to each field of a dataclass that holds
        tensors or masks.

        Raises:
            TypeError, ValueError: ``value`` is of a kind, or has a shape, that does not fit the rule.
        """
        if isinstance(value, Tensor) and isinstance(cut, Split):
            return self._split(value, cut, name)
        if isinstance(cut, Entries):
            return self._cut_entries(value, cut, name)
        if isinstance(cut, Count):
            numbers = value
            for index in cut.at:
                numbers = numbers[index]
            total = prod(numbers)
            too_few = bool(total < self.mesh.ranks * self.fewest_on_a_rank(cut.segment))
            self._note(Segment(cut.segment, total, replicated=too_few), 0, name)
            return value
        if isinstance(value, Mapping):
            return {key: self._cut_entry(item, cut, name) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return like_sequence(value, [self._cut_entry(item, cut, name) for item in value])
        if has_fields(value) and not isinstance(cut, (FirstTokens, LastTokens)):
            holding = {field: entry for field, entry in fields_of(value).items() if _holds_tensors(entry)}
            return with_fields(
                value, {field: self.cut(x, cut, f"{name}.{field}") for field, x in holding.items()}
            )
        if isinstance(cut, SplitMask):
            return self._split_mask(value, cut, name)
        if isinstance(cut, (FirstTokens, LastTokens)):
            return self._count(value, cut)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}; the plan splits it, so a tensor or a list of tensors is expected."
            )
        if isinstance(cut, CumulativeLengths):
            return self._clamp_lengths(value, cut, name)
        if isinstance(cut, Gather):
            return self._gather(value, cut)
        if isinstance(cut, Replicate):
            total = prod([value.shape[dim] for dim in (cut.dim, *cut.together)])
            self._note(Segment(cut.segment, total, replicated=True), cut.dim, name)
            return value
        return self._split(value, cut, name)

    def _cut_entry(self, entry: Any, cut: ShardRule, name: str) -> Any:
        # A ControlNet has residuals for some blocks only.
        if entry is None:
            return None
        return self.cut(entry, cut, name)

    def _split_mask(self, value: Any, cut: SplitMask, name: str) -> Any:
        shard_mask = mask_sharder(value)
        if shard_mask is None:
            raise TypeError(
                f"{name} is a {type(value).__name__}; the plan shards it as a BlockMask of flex attention."
            )
        query_layout = self._layout_of(cut.queries, value.seq_lengths[0])
        key_layout = self._layout_of(cut.keys or cut.queries, value.seq_lengths[1])
        if not (query_layout.sharded or key_layout.sharded):
            return value
        if torch.compiler.is_compiling():
            return shard_mask(value, query_layout, key_layout, self.mesh)
        sharded = self._masks.get(value)
        if sharded is None or sharded[:2] != (query_layout, key_layout):
            sharded = query_layout, key_layout, shard_mask(value, query_layout, key_layout, self.mesh)
            self._masks[value] = sharded
        return sharded[2]

    def _cut_entries(self, value: Any, cut: Entries, name: str) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(cut.cuts):
            length = ""
            if isinstance(value, (list, tuple)):
                length = f" of {len(value)} entries"
            raise TypeError(
                f"{name} is a {type(value).__name__}{length}; the plan expects a tuple of {len(cut.cuts)} entries."
            )
        entries = list(value)
        for index, rule in enumerate(cut.cuts):
            if rule is not None:
                entries[index] = self.cut(entries[index], rule, name)
        return like_sequence(value, entries)

    def _split(self, value: Tensor, split: Split, name: str) -> Tensor:
        if split.ndim is not None and value.ndim != split.ndim:
            if split.segment is None and value.ndim < split.ndim:
                return value
            if split.like is None:
                raise ValueError(
                    f"{name} has {value.ndim} dims {list(value.shape)}; the plan splits a tensor of {split.ndim}."
                )
        if split.per != 1:
            dim = split.dim % value.ndim
            if split.per is not None:
                grouped = torch.unflatten(value, dim, (-1, split.per))
            else:
                grouped = torch.unflatten(value, dim, (self.segment(split.like or "").total, -1))
            return self._split(grouped, replace(split, dim=dim, ndim=None, per=1), name).flatten(dim, dim + 1)
        if split.runs:
            dim = split.dim % value.ndim
            grouped = torch.unflatten(value, dim, (-1, self.segment(split.like or "").total))
            return self._split(grouped, replace(split, dim=dim + 1, ndim=None, runs=False), name).flatten(
                dim, dim + 1
            )
        if split.only is not None:
            start, stop = self._range_on_rank(
                split.only, value.shape[split.dim], self.segment(split.like or "")
            )
            return value.narrow(split.dim, start, stop - start)
        if split.then_replicated:
            total = self.segment(split.like or "").total
            cut, rest = value.split([total, value.shape[split.dim] - total], dim=split.dim)
            return torch.cat(
                [self._split(cut, replace(split, then_replicated=False), name), rest], dim=split.dim
            )
        if split.after_replicated:
            segment = self.segment(split.segment or split.like or "")
            layout = self._layout_with_prefix(value, split.dim, segment, segment.total)
            return shard_tokens(value, split.dim, layout, self.mesh)
        if split.together:
            segment = self._segment_of_groups(value, split)
            self._note(segment, split.dim, name)
            if segment.replicated:
                return value
            return self._shard_known(value, split.dim, segment)
        segment_name = split.segment or split.like or name
        known = self.segments.get(segment_name)
        if known is not None and split.after is None:
            if known.together != 1:
                return self._shard_known(value, split.dim, known)
            # A segment of few frames is replicated, even if it has enough tokens.
            if known.replicated and known.total == value.shape[split.dim]:
                return value
        if split.after is None and not torch.compiler.is_compiling():
            return self._split_eagerly(value, split, name, segment_name)
        first: tuple[Segment, ...] = ()
        if split.after is not None:
            first = (self.segment(split.after),)
        total = value.shape[split.dim] - sum([segment.total for segment in first])
        segment = self.new_segment(segment_name, total)
        if split.segment is not None or not segment.replicated:
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
        known = self._known_cuts.get((id(split), total))
        if known is None or known.split is not split or known.name != segment_name:
            segment = self.new_segment(segment_name, total)
            runs = SequenceLayout((segment,), self.mesh.ranks).runs(self.mesh.rank)
            if len(self._known_cuts) >= _MOST_KNOWN:
                self._known_cuts.clear()
            known = self._known_cuts[id(split), total] = _KnownCut(split, segment_name, segment, runs)
        segment = known.segment
        noted = self.segments.get(segment_name)
        if (noted is None or noted.total != total) and (split.segment is not None or not segment.replicated):
            self._note(segment, split.dim, name)
        if segment.replicated:
            return value
        return copy_runs(value, split.dim, known.runs)

    def _count(self, number: int, cut: FirstTokens | LastTokens) -> int:
        which: Literal["first", "last"] = "last"
        if isinstance(cut, FirstTokens):
            which = "first"
        start, stop = self._range_on_rank(which, number, self.segment(cut.segment))
        return stop - start

    def _clamp_lengths(self, lengths: Tensor, cut: CumulativeLengths, name: str) -> Tensor:
        if lengths.shape != (2,):
            raise ValueError(
                f"{name} has shape {list(lengths.shape)}; expected [2], the cumulative lengths of one sequence, whose "
                f"tokens, {cut.segment}, the plan shards. Call the model once for each sequence."
            )
        # Reading a length would wait for the device.
        return lengths.clamp(max=self.segment(cut.segment).size(self.mesh.rank, self.mesh.ranks))

    def outputs_at(self, output: Any, cuts: Mapping[int | str, ShardRule], module_name: str) -> Any:
        """Return a module's output, a tensor, tuple or dataclass, with each rule of ``cuts`` applied at its
        index, or at an index and the path of a field, such as ``"0.x"``. A tensor, dataclass or named tuple
        has the index 0.
        """
        for key, cut in cuts.items():
            index, _, path = str(key).partition(".")
            name = f"{module_name}[{index}]" + (path and f".{path}")
            if isinstance(output, Tensor) or (has_fields(output) and (path or not isinstance(output, tuple))):
                output = self._cut_at(path, output, cut, name)
            else:
                parts = list(output)
                parts[int(index)] = self._cut_at(path, parts[int(index)], cut, name)
                output = _rebuild_sequence(output, parts)
        return output

    def outputs(self, output: Any, gathers: Sequence[Gather | None]) -> Any:
        """Return a module's output with its i-th tensor gathered by ``gathers[i]``, if that is not None.
        ``output`` is a tensor, a tuple or list, a dataclass, or a ``ModelOutput`` of diffusers, which is
        changed in place.
        """
        if isinstance(output, Tensor):
            return self._gather(output, gathers[0])
        if type(output) is tuple:
            parts = list(output)
            for index, gather in enumerate(gathers[: len(parts)]):
                parts[index] = self._gather(parts[index], gather)
            return tuple(parts)
        if has_fields(output):
            for name, gather in zip(fields_of(output), gathers, strict=False):
                if gather is not None:
                    without_field = replace(gather, field="")
                    output = change_field(
                        output, gather.field or name, partial(self._gather, gather=without_field)
                    )
            return output
        if isinstance(output, (tuple, list)):
            gathered = [self._gather(value, gather) for value, gather in zip(output, gathers, strict=False)]
            return type(output)([*gathered, *output[len(gathered) :]])
        # Change a ModelOutput in place, because its entries are also attributes.
        for key, gather in zip(list(output.keys()), gathers, strict=False):
            output[key] = self._gather(output[key], gather)
        return output

    def _gather(self, value: Any, gather: Gather | None) -> Any:
        if gather is None or value is None:
            return value
        if gather.field:
            return change_field(value, gather.field, partial(self._gather, gather=replace(gather, field="")))
        segment = self.segments.get(gather.segment)
        if segment is None:
            segment = self.segment(gather.segment)
        if not torch.compiler.is_compiling():
            known = self._known_gathers.get((id(gather), segment, value.shape[gather.dim], value.ndim))
            if known is not None and known.gather is gather:
                return self.put_together(value, known.dim, known.layout)
        noted = segment
        if gather.after_replicated or gather.then_replicated:
            tokens = segment.size(self.mesh.rank, self.mesh.ranks)
            layout = self._layout_with_prefix(value, gather.dim, segment, tokens)
            if not gather.after_replicated:
                layout = SequenceLayout(layout.segments[::-1], self.mesh.ranks)
            return self.put_together(value, gather.dim, layout)
        groups = groups_of(segment)
        if value.shape[gather.dim] == groups.size(self.mesh.rank, self.mesh.ranks):
            segment = groups
        layout = SequenceLayout((segment,), self.mesh.ranks)
        dim = gather.dim % value.ndim
        if gather.per != 1:
            value = torch.unflatten(value, dim, (layout.size(self.mesh.rank), -1))
        if segment.replicated:
            gathered = self.with_equal_bits(value, dim, segment)
        else:
            gathered = self.put_together(value, dim, layout)
            if gather.per == 1 and not torch.compiler.is_compiling():
                if len(self._known_gathers) >= _MOST_KNOWN:
                    self._known_gathers.clear()
                key = id(gather), noted, value.shape[dim], value.ndim
                self._known_gathers[key] = _KnownGather(gather, dim, layout)
        if gather.per != 1:
            return gathered.flatten(dim, dim + 1)
        return gathered


def _rebuild_sequence(output: Any, parts: list[Any]) -> Any:
    """Return ``parts`` as a named tuple like ``output`` if that is one, and as a tuple otherwise."""
    if has_fields(output):
        return like_sequence(output, parts)
    return tuple(parts)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (Tensor, BlockMask)) for leaf in leaves_of(value))
