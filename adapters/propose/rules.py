"""Guess the rules of companions: block parameters that grow with the tokens, and are not computed from them.

A guess may be wrong, also that a parameter needs no rule: ``propose.py`` takes a plan only after it has
compared its results with those of the unmodified model. Only ``candidates.py`` calls this file. Attention is
in ``attention_rules.py``. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from para_core.adapters.propose.choices import Choice
from para_core.adapters.propose.records import BlockMaskRecord, TensorRecord
from para_core.adapters.propose.region import TEXT, ObservedRegion
from para_core.adapters.propose.start import Lengths, grown_dims
from para_core.plans.plan import (
    CumulativeLengths,
    Entries,
    FirstTokens,
    LastTokens,
    Replicate,
    ShardRule,
    Split,
    SplitMask,
)


@dataclass(frozen=True)
class RuleGuess:
    """A guessed rule, and the reason for it, in the form of those of a ``Candidate``."""

    rule: ShardRule
    reason: str


# The rules of the parameters that accompany the tokens, by (module, parameter).
Companions = dict[tuple[str, str], RuleGuess]


def guess_companions(region: ObservedRegion, choice: Choice) -> Companions:
    """Return the rules for block parameters that grow with the tokens.

    Such a parameter is not computed from the tokens: a position embedding, for example, a list of these, or
    an int that counts tokens. Any int that grows is taken for such a number. If a rule depends on the length
    of text, the text parameter gets a :class:`Replicate` rule. Blocks of one list that need the same rule
    share the name ``list.*``.
    """
    companions: Companions = {}
    text, start = region.text_parameter(), region.start.block
    parameters = _rules_by_parameter(region, choice)
    for parameter in parameters:
        for name, rule in parameter.named_rules(start):
            reason = f"{name}({parameter.name}): {_content(rule)}, and is not computed from the tokens."
            companions[name, parameter.name] = RuleGuess(rule, reason)
        if text is not None and any(_follows_text(rule) for rule in parameter.rules.values()):
            reason = f"{start}({text.name}): does not grow; its tokens come first in tensors that hold both."
            companions[start, text.name] = RuleGuess(Replicate(text.dim, TEXT), reason)
    return companions


@dataclass
class _GrowingParameter:
    """A parameter ``name`` of the blocks in the list ``owner``, and its rule in each block that needs one.

    ``blocks`` are the names of all blocks of the list.
    """

    owner: str
    name: str
    blocks: set[str]
    rules: dict[str, ShardRule]

    def named_rules(self, start: str) -> Iterator[tuple[str, ShardRule]]:
        """Yield the rules with the names of their modules in the plan; a rule of all blocks once."""
        rules = [*self.rules.values()]
        is_equal = all(rule == rules[0] for rule in rules)
        if is_equal and len(rules) == len(self.blocks) and self.owner != start:
            yield f"{self.owner}.*", rules[0]
        else:
            yield from self.rules.items()


def _rules_by_parameter(region: ObservedRegion, choice: Choice) -> list[_GrowingParameter]:
    """Return the parameters of blocks that need a rule, from all calls of the region, in the order of time."""
    parameters: dict[tuple[str, str], _GrowingParameter] = {}
    blocks: dict[str, set[str]] = {}
    guess, start = _ValueRules(region, choice), region.start
    for call, larger_call in region.calls():
        is_start = call.name == start.block
        owner = call.block_list
        if owner is None and is_start:
            owner = call.name
        if owner is None:
            continue
        names = blocks.setdefault(owner, set())
        names.add(call.name)
        for name, value in call.arguments.items():
            if is_start and name in start.streams:
                continue
            rule = guess.rule(name, value, larger_call.arguments.get(name))
            if rule is not None:
                parameter = _GrowingParameter(owner, name, names, {})
                parameters.setdefault((owner, name), parameter).rules[call.name] = rule
    return [*parameters.values()]


def _content(rule: ShardRule) -> str:
    """Return what a parameter with this rule is taken for, as the predicate of a sentence."""
    if isinstance(rule, CumulativeLengths):
        return "holds the length of the sequence"
    if isinstance(rule, (FirstTokens, LastTokens)):
        return "grows with the tokens, so it is taken for a number of tokens"
    if isinstance(rule, Split) and rule.only is not None:
        return "has an entry for each token but a fixed number of them"
    return "has an entry for each token"


def _follows_text(rule: ShardRule) -> bool:
    """Whether the rule splits a tensor in which text precedes the tokens."""
    entries: Sequence[ShardRule | None] = rule.cuts if isinstance(rule, Entries) else [rule]
    return any(isinstance(entry, Split) and bool(entry.after) for entry in entries)


@dataclass(frozen=True)
class _ValueRules:
    """Guesses the rule of a value from its records in the smaller and in the larger call."""

    region: ObservedRegion
    choice: Choice

    def rule(self, parameter: str, value: Any, larger: Any) -> ShardRule | None:
        """Return the rule for a tensor, mask, number of tokens, or a list or mapping of tensors or masks.

        None if the value needs no rule, if the choice leaves it whole, or if no rule fits, such as for a list
        of numbers.

        Entries with different rules are possible in the outermost list only, if they are tensors.
        """
        if isinstance(value, TensorRecord) and isinstance(larger, TensorRecord):
            return self._tensor_rule(parameter, value, larger)
        if isinstance(value, BlockMaskRecord) and isinstance(larger, BlockMaskRecord):
            return self._mask_rule(value, larger)
        if type(value) is int and type(larger) is int and value != larger:
            return self.choice.numbers(self.region.segment)
        if isinstance(value, Mapping) and isinstance(larger, Mapping) and value.keys() == larger.keys():
            pairs = [(entry, larger[key]) for key, entry in value.items()]
            return _common_rule([self.rule(parameter, *pair) for pair in pairs])
        if (
            isinstance(value, (list, tuple))
            and isinstance(larger, (list, tuple))
            and len(value) == len(larger)
        ):
            pairs = [*zip(value, larger, strict=True)]
            rules = [self.rule(parameter, *pair) for pair in pairs]
            return _common_rule(rules) or _rule_of_entries(rules)
        return None

    def _tensor_rule(self, parameter: str, record: TensorRecord, larger: TensorRecord) -> ShardRule | None:
        """Return the rule for a tensor of which one dim grows; None if it needs none, or is left whole by choice."""
        region = self.region
        if [record.values, larger.values] == [(0, tokens) for tokens in region.start.tokens]:
            return CumulativeLengths(region.segment)
        dims = grown_dims(record, larger)
        # True for integer position ids, too. If they must be split, a plan that leaves them whole is not
        # exact, and a choice that splits them follows.
        may_be_mask = "mask" in parameter or not record.dtype.is_floating_point
        if record.derived or len(dims) != 1 or (may_be_mask and not self.choice.split_masks):
            return None
        ((dim, lengths),) = dims.items()
        segments = self._segments(lengths)
        if segments is None:
            return self._rule_of_some(dim, lengths)
        after = None
        if segments == (TEXT, region.segment):
            after = TEXT
        return Split(
            dim, like=region.segment, after=after, then_replicated=segments == (region.segment, TEXT)
        )

    def _rule_of_some(self, dim: int, lengths: Lengths) -> Split | None:
        """Return the rule for a tensor with an entry for some tokens: all but a fixed number of the first or
        last.
        """
        small, large = self.region.start.tokens
        if not small - lengths[0] == large - lengths[1] > 0:
            return None
        if self.choice.text_first:
            return Split(dim, like=self.region.segment, only="last")
        return Split(dim, like=self.region.segment, only="first")

    def _mask_rule(self, mask: BlockMaskRecord, larger: BlockMaskRecord) -> SplitMask | None:
        """Return the rule for a ``BlockMask``; None if it is computed from the tokens, or no segments fit."""
        if mask.derived or mask.lengths == larger.lengths:
            return None
        queries, keys = [
            self._segments(lengths) for lengths in zip(mask.lengths, larger.lengths, strict=True)
        ]
        if queries is None or keys is None:
            return None
        if keys == queries:
            return SplitMask(queries, None)
        return SplitMask(queries, keys)

    def _segments(self, lengths: Lengths) -> tuple[str, ...] | None:
        return self.region.segments_of(lengths, text_first=self.choice.text_first)


def _common_rule(rules: Sequence[ShardRule | None]) -> Split | SplitMask | None:
    """Return the rule that all entries of a list or mapping share; None if they do not share one."""
    first = rules[0] if rules else None
    if isinstance(first, (Split, SplitMask)) and all(rule == first for rule in rules):
        return first
    return None


def _rule_of_entries(rules: Sequence[ShardRule | None]) -> Entries | None:
    """Return the rule for a list whose entries have different rules; None if it needs none, or cannot have
    one.
    """
    splits = [rule for rule in rules if rule is None or isinstance(rule, Split)]
    if not any(splits) or len(splits) != len(rules):
        return None
    return Entries(tuple(splits))
