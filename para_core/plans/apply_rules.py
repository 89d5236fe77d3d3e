"""Apply the rules of a plan to tensors: shard them, gather them, or record how many tokens they hold.

:mod:`.region` and :mod:`.submodule_calls` call this for the arguments and outputs of a model and its
submodules. How a tensor is split is in :mod:`.split_rules`, and how outputs are gathered in
:mod:`.gathered_outputs`. PipeFusion has a subclass of :class:`RuleExecutor` in
:mod:`para_core.weights.patch_hooks`. Tests: tests/plans/test_plan.py, tests/plans/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from math import prod
from typing import Any, Literal
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
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.modes.registry import mask_sharder
from para_core.plans.gathered_outputs import GatheredOutputs
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
from para_core.plans.split_rules import SplitRules


class RuleExecutor(SplitRules, GatheredOutputs):
    """An executor of plan rules on the tensors of one model call at a time.

    Rules apply in the order in which their tensors are met: a rule that refers to a segment needs an earlier
    one that noted it in :attr:`segments`. Gathering is collective, so every rank must call its modules in the
    same order.
    """

    def __init__(self, mesh: SequenceMesh, coarse: Collection[str] = ()) -> None:
        super().__init__(mesh, coarse)
        # (Query layout, key layout, sharded mask) by block mask, because a model passes the same mask to
        # every block.
        self._masks: WeakKeyDictionary[BlockMask, tuple[SequenceLayout, SequenceLayout, BlockMask]]
        self._masks = WeakKeyDictionary()

    def apply_to_arguments(
        self,
        rules: Mapping[str, ShardRule],
        parameters: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module_name: str = "",
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``args`` and ``kwargs`` of a module call, with ``rules`` applied by parameter name,
        or by the path of a field of an argument, such as ``"video.x"``.

        Arguments and fields that are not passed, or are None, are skipped. ``parameters`` are the names of
        the positional parameters, in order. Raise ``TypeError`` or ``ValueError`` if an argument does not fit
        its rule. Collective if one of the rules is a :class:`Gather`.
        """
        positional = list(args)
        named = dict(kwargs)
        prefix = f"{module_name}." if module_name else ""
        is_traced = torch.compiler.is_compiling()
        for key, rule in rules.items():
            name = prefix + key
            # Most rules split tensors of a known length. This saves Python calls for each.
            if not is_traced and isinstance(rule, Split) and isinstance(named.get(key), Tensor):
                part = self.split_known(named[key], rule, name)
                if part is not None:
                    named[key] = part
                    continue
            parameter, _, path = key.partition(".")
            if named.get(parameter) is not None:
                named[parameter] = self._apply_at(path, named[parameter], rule, name)
            elif parameter in parameters[: len(positional)]:
                index = parameters.index(parameter)
                if positional[index] is not None:
                    positional[index] = self._apply_at(path, positional[index], rule, name)
        return tuple(positional), named

    def _apply_at(self, path: str, value: Any, rule: ShardRule, name: str) -> Any:
        """Return ``value`` with ``rule`` applied to its field ``path``, or to itself if the path is empty."""
        if not path:
            return self.apply(value, rule, name)
        return change_field(value, path, partial(self.apply, rule=rule, name=name))

    def apply(self, value: Any, rule: ShardRule, name: str) -> Any:
        """Return ``value``, an argument or output called ``name``, with ``rule`` applied to it, or to
        each entry of a list, tuple or dict that is not None, or to each field of a dataclass that holds
        tensors or masks. Collective if ``rule`` is a :class:`Gather`.

        Raises:
            TypeError, ValueError: ``value`` is of a kind, or has a shape, that does not fit the rule.
        """
        if isinstance(value, Tensor) and isinstance(rule, Split):
            return self.split(value, rule, name)
        if isinstance(rule, Entries):
            return self._apply_to_entries(value, rule, name)
        if isinstance(rule, Count):
            self._note_counted(value, rule, name)
            return value
        if isinstance(value, Mapping):
            return {key: self._apply_to_entry(item, rule, name) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return like_sequence(value, [self._apply_to_entry(item, rule, name) for item in value])
        if has_fields(value) and not isinstance(rule, (FirstTokens, LastTokens)):
            holding = {field: entry for field, entry in fields_of(value).items() if _holds_tensors(entry)}
            return with_fields(
                value, {field: self.apply(x, rule, f"{name}.{field}") for field, x in holding.items()}
            )
        if isinstance(rule, SplitMask):
            return self._split_mask(value, rule, name)
        if isinstance(rule, (FirstTokens, LastTokens)):
            return self._count(value, rule)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}; the plan splits it, so a tensor or a list of tensors is expected."
            )
        if isinstance(rule, CumulativeLengths):
            return self._clamp_lengths(value, rule, name)
        if isinstance(rule, Gather):
            return self._gather(value, rule)
        if isinstance(rule, Replicate):
            if not -value.ndim <= rule.dim < value.ndim:
                raise ValueError(
                    f"{name} has {value.ndim} dims {list(value.shape)}; the plan counts tokens along dim {rule.dim}."
                )
            together = prod([value.shape[dim] for dim in rule.together])
            total = value.shape[rule.dim] * together
            self._note(Segment(rule.segment, total, replicated=True, together=together), rule.dim, name)
            self.report_replicated(value, rule.segment)
            return value
        return self.split(value, rule, name)

    def _note_counted(self, value: Any, rule: Count, name: str) -> None:
        """Note the segment whose number of tokens a nested list says."""
        numbers = value
        for index in rule.at:
            numbers = numbers[index]
        self._note(self.new_segment(rule.segment, prod(numbers)), 0, name)

    def _apply_to_entry(self, entry: Any, rule: ShardRule, name: str) -> Any:
        # A ControlNet has residuals for some blocks only.
        if entry is None:
            return None
        return self.apply(entry, rule, name)

    def _split_mask(self, value: Any, rule: SplitMask, name: str) -> Any:
        """Return the rows of a block mask for this rank's queries; the mask itself if no segment is sharded.
        In eager code each mask is sharded once for a pair of layouts. Raise ``TypeError`` if it is no block
        mask.
        """
        shard_mask = mask_sharder(value)
        if shard_mask is None:
            raise TypeError(
                f"{name} is a {type(value).__name__}; the plan shards it as a BlockMask of flex attention."
            )
        query_layout = self._layout_of(rule.queries, value.seq_lengths[0])
        key_layout = self._layout_of(rule.keys or rule.queries, value.seq_lengths[1])
        if not (query_layout.sharded or key_layout.sharded):
            return value
        if torch.compiler.is_compiling():
            return shard_mask(value, query_layout, key_layout, self.mesh)
        sharded = self._masks.get(value)
        if sharded is None or sharded[:2] != (query_layout, key_layout):
            sharded = query_layout, key_layout, shard_mask(value, query_layout, key_layout, self.mesh)
            self._masks[value] = sharded
        return sharded[2]

    def _apply_to_entries(self, value: Any, rule: Entries, name: str) -> Any:
        """Return a list or tuple with ``rule.cuts[i]`` applied to entry i, unless that is None. Raise
        ``TypeError`` for another length.
        """
        if not isinstance(value, (list, tuple)) or len(value) != len(rule.cuts):
            length = ""
            if isinstance(value, (list, tuple)):
                length = f" of {len(value)} entries"
            raise TypeError(
                f"{name} is a {type(value).__name__}{length}; the plan expects a tuple of {len(rule.cuts)} entries."
            )
        entries = list(value)
        for index, rule_of_entry in enumerate(rule.cuts):
            if rule_of_entry is not None:
                entries[index] = self._apply_to_entry(entries[index], rule_of_entry, name)
        return like_sequence(value, entries)

    def _count(self, number: int, rule: FirstTokens | LastTokens) -> int:
        """Return how many of the first or last ``number`` tokens this rank holds."""
        which: Literal["first", "last"] = "last"
        if isinstance(rule, FirstTokens):
            which = "first"
        start, stop = self._range_on_rank(which, number, self.segment(rule.segment))
        return stop - start

    def _clamp_lengths(self, lengths: Tensor, rule: CumulativeLengths, name: str) -> Tensor:
        """Return the cumulative lengths of this rank's tokens. Raise ``ValueError`` for several sequences."""
        if lengths.shape != (2,):
            raise ValueError(
                f"{name} has shape {list(lengths.shape)}; expected [2], the cumulative lengths of one sequence, whose "
                f"tokens, {rule.segment}, the plan shards. Call the model once for each sequence."
            )
        # [0, n] becomes [0, tokens of this rank]. Reading n would wait for the device.
        return lengths.clamp(max=self.segment(rule.segment).size(self.mesh.rank, self.mesh.ranks))

    def apply_to_outputs(self, output: Any, rules: Mapping[int | str, ShardRule], module_name: str) -> Any:
        """Return a module's output, a tensor, tuple, list or dataclass, with each rule of ``rules`` applied
        at its index, or at an index and the path of a field, such as ``"0.x"``. A tensor or dataclass has the
        index 0, as has a named tuple if there is a path. Collective if one of the rules is a :class:`Gather`.

        Raises:
            TypeError: The module returned something else, such as a dict, or the kind of an output does not
                fit its rule.
            ValueError: The module returned fewer outputs, or the shape of one does not fit its rule.
        """
        for key, rule in rules.items():
            index, _, path = str(key).partition(".")
            name = f"{module_name}[{index}]" + (path and f".{path}")
            is_one = isinstance(output, Tensor) or (
                has_fields(output) and (path or not isinstance(output, tuple))
            )
            if not (is_one or isinstance(output, (tuple, list))):
                raise TypeError(
                    f"the plan has a rule for {name}, but {module_name} returned a {type(output).__name__}; expected a "
                    "tensor, tuple, list or dataclass. Name a module inside it that returns the tensor."
                )
            parts = [output] if is_one else list(output)
            if int(index) >= len(parts):
                raise ValueError(
                    f"the plan has a rule for {name}, but {module_name} returned {len(parts)} output(s). Name an "
                    "index below that."
                )
            parts[int(index)] = self._apply_at(path, parts[int(index)], rule, name)
            output = parts[0] if is_one else like_sequence(output, parts)
        return output


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (Tensor, BlockMask)) for leaf in leaves_of(value))
