"""Guess where tokens may be sharded first, and candidate plans, from what grows from a smaller to a larger call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any, Literal

from para_core.adapters.propose.observe import (
    MaskRecord,
    ModuleCall,
    ObservedCall,
    ObservedSoftmax,
    TensorRecord,
    output_tensors,
    tensors_of,
)
from para_core.plans.plan import (
    Attention,
    CumulativeLengths,
    Entries,
    FirstTokens,
    Gather,
    LastTokens,
    Plan,
    Replicate,
    ShardRule,
    Split,
    SplitMask,
)

# Name of the segment of text tokens, which the candidate plans replicate.
TEXT = "text"
# A length in the smaller call, and the same length in the larger call.
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Start:
    """A module at whose inputs tokens may be sharded: the first block of a list, or a module that contains all blocks.

    ``streams`` are the parameters of the module that hold them, along ``dim``, with ``entries`` in the smaller and in
    the larger call. Each entry is a token, or in ``[B, T, H, W, C]`` a frame of ``group`` tokens in the dims
    ``together``.
    """

    block: str
    entries: Lengths
    streams: tuple[str, ...]
    dim: int
    together: tuple[int, ...] = ()
    group: int = 1

    @property
    def tokens(self) -> Lengths:
        """The numbers of tokens in the smaller and in the larger call."""
        return self.entries[0] * self.group, self.entries[1] * self.group

    def token_dims(self, small: TensorRecord, large: TensorRecord) -> list[int]:
        """Return the dims that are as long as the tokens, or as the entries, in both calls."""
        known = (self.tokens, self.entries)
        return [dim for dim, lengths in grown_dims(small, large).items() if lengths in known]


def grown_dims(small: TensorRecord, large: TensorRecord) -> dict[int, Lengths]:
    """Return the dims whose lengths differ, each with both lengths. Empty if the numbers of dims differ."""
    if len(small.shape) != len(large.shape):
        return {}
    pairs = zip(small.shape, large.shape, strict=True)
    return {dim: lengths for dim, lengths in enumerate(pairs) if lengths[0] != lengths[1]}


def streams_of(calls: list[ModuleCall]) -> tuple[str, ...]:
    """Return the parameters of the first block of ``calls`` whose updated values it returns, in that order.

    An output belongs to the parameter through which the next block receives it, or else to one of the same shape that
    the next block does not get unchanged. An output that belongs to no parameter gives ``""``. Fields of a dataclass
    that the block returns unchanged are left out.
    """
    inputs = {name: value for name, value in calls[0].arguments.items() if isinstance(value, TensorRecord)}
    following = calls[1].arguments if len(calls) > 1 else {}
    passed_on = {record.identity for name, record in inputs.items() if "." in name}
    streams: list[str] = []
    for output in tensors_of(calls[0].output):
        if output.identity in passed_on:
            continue
        received = [name for name, value in following.items() if getattr(value, "identity", None) == output.identity]
        same_shape = [
            name
            for name, record in inputs.items()
            if record.shape == output.shape
            and name not in streams
            and getattr(following.get(name), "identity", None) != record.identity
        ]
        streams.append((received or same_shape or [""])[0])
    return tuple(streams)


def starts(small: ObservedCall, large: ObservedCall) -> Iterator[Start]:
    """Yield the possible starts in the order of time: first block lists, then modules that contain blocks."""
    for name in dict.fromkeys(call.block_list for call in small.calls if call.block_list is not None):
        calls, larger_calls = small.of_list(name), large.of_list(name)
        if larger_calls and small.attends(calls[0].began, calls[-1].ended):
            yield from _start(calls[0], larger_calls[0], streams_of(calls))
    outer = [call for call in small.calls if call.block_list is None and small.attends(call.began, call.ended)]
    for call in sorted(outer, key=lambda call: call.began):
        larger_call = next((other for other in large.calls if other.name == call.name), None)
        sequences = [
            parameter
            for parameter, value in call.arguments.items()
            if isinstance(value, TensorRecord) and value.dtype.is_floating_point and len(value.shape) == 3
        ]
        if larger_call is not None:
            yield from _start(call, larger_call, sequences)


def _start(call: ModuleCall, larger_call: ModuleCall, streams: Iterable[str]) -> Iterator[Start]:
    growing: list[tuple[str, int, Lengths]] = []
    for stream in streams:
        record, larger = call.arguments.get(stream), larger_call.arguments.get(stream)
        if isinstance(record, TensorRecord) and isinstance(larger, TensorRecord):
            dims = grown_dims(record, larger)
            growing += [(stream, dim, lengths) for dim, lengths in dims.items() if len(dims) == 1]
    if growing:
        # If several parameters grow differently, choose hidden_states, which in diffusers holds the image tokens.
        stream, dim, entries = next((entry for entry in growing if entry[0] == "hidden_states"), growing[0])
        streams = tuple(entry[0] for entry in growing if entry[1:] == (dim, entries))
        shape = call.arguments[stream].shape
        together = tuple(range(dim + 1, len(shape) - 1))
        if together:
            yield Start(call.name, entries, streams, dim, together, prod(shape[dim + 1 : -1]))
        yield Start(call.name, entries, streams, dim)


@dataclass(frozen=True)
class Choice:
    """Properties of a plan that cannot be seen from tensor sizes. Each combination is tried.

    ``text_first``: replicated text tokens precede the sharded ones in a joint sequence. ``split_masks``: arguments that
    are not floating-point are split with the tokens, or else replicated. ``mask`` is that of :class:`Attention`.
    ``numbers`` is the rule of an integer that grows with the tokens: it counts the first or the last ones.
    """

    text_first: bool
    split_masks: bool
    mask: Literal["keys", "pairs"] | None
    numbers: type[FirstTokens] | type[LastTokens] = FirstTokens


# Values of split_masks and mask to try, the likeliest first. For split masks "keys" comes before None: a mask over a
# single local token has size 1, which None would read as a mask that is broadcast to all keys.
_READINGS: tuple[tuple[bool, Literal["keys"] | None], ...] = (
    (False, None),
    (False, "keys"),
    (True, "keys"),
    (True, None),
)
_CHOICES = [Choice(text_first, *reading) for text_first, reading in product((True, False), _READINGS)]
_CHOICES.append(Choice(text_first=False, split_masks=False, mask="pairs"))
CHOICES = tuple(replace(choice, numbers=numbers) for numbers in (FirstTokens, LastTokens) for choice in _CHOICES)


_PER_TOKEN = "has an entry for each token"


@dataclass(frozen=True)
class Candidate:
    """A plan that agrees with the observed sizes, and a sentence with the reason for each of its entries."""

    plan: Plan
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ObservedRegion:
    """The same part of the model in a smaller and in a larger call: everything from a :class:`Start` on.

    Tensors of the smaller call that were computed from the tokens are ``derived``. Plans name the tokens ``segment``.
    """

    start: Start
    small: ObservedCall
    large: ObservedCall
    segment: str

    def calls(self) -> list[tuple[ModuleCall, ModuleCall]]:
        """Return the module calls from the start on in the order of time, as pairs (smaller call, larger call)."""
        pairs = [*zip(self.small.calls, self.large.calls, strict=False)]
        began = next(call.began for call, _ in pairs if call.name == self.start.block)
        return sorted([pair for pair in pairs if pair[0].began >= began], key=lambda pair: pair[0].began)

    @property
    def _first_arguments(self) -> Mapping[str, Any]:
        return next(call.arguments for call, _ in self.calls() if call.name == self.start.block)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the plans that agree with the observed sizes, the likeliest first, without repetitions."""
        plans: set[str] = set()
        for choice in CHOICES:
            for ending in self._endings():
                candidate = self._candidate(choice, *ending)
                if candidate is not None and repr(candidate.plan) not in plans:
                    plans.add(repr(candidate.plan))
                    yield candidate

    def _endings(self) -> list[tuple[ModuleCall, tuple[Gather | None, ...]]]:
        """Return where the tokens may be gathered, as (call, rules of its outputs), the latest call first.

        Calls with an output larger than the tokens come last: logits over a vocabulary cost more to gather than what
        they are computed from, and some models compute them for the last token only.
        """
        calls = self.calls()
        size = prod(self._first_arguments[self.start.streams[0]].shape)
        last_block = max((call.ended for call, _ in calls if call.block_list is not None), default=0)
        endings: list[tuple[bool, ModuleCall, tuple[Gather | None, ...]]] = []
        for call, larger_call in calls:
            if call.ended < last_block:
                continue
            outputs = zip(output_tensors(call.output), output_tensors(larger_call.output), strict=False)
            of_tokens = [
                (record, index, Gather(dims[0], self.segment, field=path))
                for (index, path, record), (*_, larger) in outputs
                if record.derived and len(dims := self.start.token_dims(record, larger)) == 1
            ]
            if of_tokens:
                record, index, first = of_tokens[0]
                # All fields of a dataclass that is the whole output can be gathered, but one tensor of a tuple.
                others = [gather for *_, gather in of_tokens[1:]] if first.field and len(call.output) == 1 else []
                endings.append((prod(record.shape) > size, call, (*[None] * index, first, *others)))
        endings.reverse()
        return [(call, gathers) for _, call, gathers in sorted(endings, key=itemgetter(0))]

    def _candidate(self, choice: Choice, ending: ModuleCall, gathers: tuple[Gather | None, ...]) -> Candidate | None:
        inner: dict[str, dict[str | int, ShardRule]] = {}
        reasons = []
        for stream in self.start.streams:
            split = Split(self.start.dim, segment=self.segment, together=self.start.together)
            inner.setdefault(self.start.block, {})[stream] = split
            small, large = self.start.tokens
            reasons.append(
                f"{self.start.block}({stream}): a stream of tokens through the blocks, {small} in the smaller call and "
                f"{large} in the larger one."
            )
        for (name, parameter), (rule, why) in self._companions(choice).items():
            if isinstance(rule, Replicate):
                inner[self.start.block][parameter] = rule
            elif parameter not in inner.get(name, {}):
                inner.setdefault(name, {})[parameter] = rule
            reasons.append(why)
        of_attention = self._attention(choice, ending)
        if of_attention is None:
            return None
        joint, attention, attention_reasons = of_attention
        # The last block of a list is named ``-1``, because another checkpoint of the model may have more blocks.
        of_list = [] if ending.block_list is None else self.small.of_list(ending.block_list)
        name = f"{ending.block_list}.-1" if of_list and ending.name == of_list[-1].name else ending.name
        reasons.append(f"{name}: its output is gathered, because it has one entry for each token.")
        inputs: dict[str, ShardRule] = {}
        for parameter in sorted(self.small.joined_inputs):
            records, larger = (tensors_of(call.inputs[parameter]) for call in (self.small, self.large))
            dims = {dim for pair in zip(records, larger, strict=False) for dim in self.start.token_dims(*pair)}
            if len(dims) == 1:
                inputs[parameter] = Split(dims.pop(), like=self.segment)
                reasons.append(f"{parameter}: the model joins it to the tokens between its blocks.")
        outputs = {name: gathers[0] if gathers[0] is not None and len(gathers) == 1 else gathers}
        return Candidate(Plan(inputs, outputs, joint, inner, attention), (*reasons, *attention_reasons))

    def _companions(self, choice: Choice) -> dict[tuple[str, str], tuple[ShardRule, str]]:
        """Return a rule and its reason, by (module, parameter), for block parameters that grow with the tokens.

        Such a parameter is not computed from the tokens: a position embedding, for example, an int that counts tokens,
        or a list of these. If a rule depends on the length of text, the text parameter gets a :class:`Replicate` rule.
        Blocks of one list that need the same rule share the name ``list.*``.
        """
        rules: dict[tuple[str, str], dict[str, ShardRule]] = {}
        blocks: dict[str, set[str]] = {}
        for call, larger_call in self.calls():
            owner = call.block_list or (call.name if call.name == self.start.block else None)
            if owner is None:
                continue
            blocks.setdefault(owner, set()).add(call.name)
            for parameter, value in call.arguments.items():
                if call.name == self.start.block and parameter in self.start.streams:
                    continue
                rule = self._rule(parameter, value, larger_call.arguments.get(parameter), choice)
                if rule is not None:
                    rules.setdefault((owner, parameter), {})[call.name] = rule
        companions: dict[tuple[str, str], tuple[ShardRule, str]] = {}
        text = self.text_parameter()
        for (owner, parameter), by_block in rules.items():
            equal = len({repr(rule) for rule in by_block.values()}) == 1
            of_all = equal and len(by_block) == len(blocks[owner]) and owner != self.start.block
            for name, rule in [(f"{owner}.*", next(iter(by_block.values())))] if of_all else by_block.items():
                what = "holds the length of the sequence" if isinstance(rule, CumulativeLengths) else _PER_TOKEN
                why = f"{name}({parameter}): {what}, and is not computed from the tokens."
                companions[name, parameter] = (rule, why)
            cuts = [cut for rule in by_block.values() for cut in (rule.cuts if isinstance(rule, Entries) else [rule])]
            if text is not None and any(isinstance(cut, Split) and cut.after for cut in cuts):
                why = f"{self.start.block}({text[0]}): does not grow; its tokens come first in tensors that hold both."
                companions[self.start.block, text[0]] = (Replicate(text[1], TEXT), why)
        return companions

    def text_parameter(self) -> tuple[str, int, int] | None:
        """Return the parameter of the first block that holds the text of a joint sequence, its token dim and length.

        None if no parameter of the block is as long as the part of the keys that does not grow.
        """
        small, large = self.start.tokens
        lengths = {
            attention.keys - small
            for attention, larger in zip(self.small.attention, self.large.attention, strict=False)
            if attention.keys - small == larger.keys - large
        }
        for parameter, value in self._first_arguments.items():
            if isinstance(value, TensorRecord) and len(value.shape) == 3 and parameter not in self.start.streams:
                for dim in (1, 0):
                    if value.shape[dim] in lengths:
                        return parameter, dim, value.shape[dim]
        return None

    def handwritten(self) -> list[ObservedSoftmax]:
        """Return the softmaxes over scores of tokens, one for each module, that a plan would leave to one rank.

        They are computed from the tokens, before these are gathered, and the model's output is computed from them.
        """
        ends = max((call.ended for call, _ in self._endings()), default=0)
        larger = [softmax.shape for softmax in self.large.softmaxes]
        by_module: dict[str, ObservedSoftmax] = {}
        for index, softmax in enumerate(self.small.softmaxes):
            *_, rows, columns = softmax.shape
            grows = index < len(larger) and larger[index][-1] != columns
            are_scores = grows or rows == columns or columns >= self.start.tokens[0]
            if softmax.derived and softmax.is_used and softmax.time < ends and are_scores:
                by_module.setdefault(softmax.name, softmax)
        return [*by_module.values()]

    def samples(self) -> int | None:
        """Return the number of samples in the smaller call. None if the tokens at the start have no batch dim."""
        shape = self._first_arguments[self.start.streams[0]].shape
        if self.start.together:
            return int(shape[0]) if self.start.dim == 1 else None
        return int(shape[1 - self.start.dim]) if len(shape) == 3 and self.start.dim < 2 else None

    def _rule(self, parameter: str, value: Any, larger: Any, choice: Choice) -> ShardRule | None:
        """Return the rule for a tensor, mask, number of tokens, or a list or mapping of them; None if it needs none.

        Entries with different rules are possible in the outermost list only.
        """
        if isinstance(value, TensorRecord) and isinstance(larger, TensorRecord):
            if [value.values, larger.values] == [(0, tokens) for tokens in self.start.tokens]:
                return CumulativeLengths(self.segment)
            dims = grown_dims(value, larger)
            stays_whole = not choice.split_masks and ("mask" in parameter or not value.dtype.is_floating_point)
            if value.derived or len(dims) != 1 or stays_whole:
                return None
            ((dim, lengths),) = dims.items()
            segments = self._segments_of(lengths, choice)
            if segments is None:
                return self._rule_of_some(dim, lengths, choice)
            after = TEXT if segments[0] == TEXT and len(segments) > 1 else None
            return Split(dim, like=self.segment, after=after, then_replicated=segments[1:] == (TEXT,))
        if isinstance(value, MaskRecord) and isinstance(larger, MaskRecord):
            return self._mask_rule(value, larger, choice)
        if type(value) is int and type(larger) is int and value != larger:
            return choice.numbers(self.segment)
        if isinstance(value, Mapping) and isinstance(larger, Mapping) and value.keys() == larger.keys():
            pairs = [(entry, larger[key]) for key, entry in value.items()]
        elif isinstance(value, (list, tuple)) and isinstance(larger, (list, tuple)) and len(value) == len(larger):
            pairs = [*zip(value, larger, strict=True)]
        else:
            return None
        entries = [self._rule(parameter, entry, larger_entry, choice) for entry, larger_entry in pairs]
        if entries and isinstance(entries[0], SplitMask) and len({repr(rule) for rule in entries}) == 1:
            return entries[0]
        rules = [rule for rule in entries if rule is None or isinstance(rule, Split)]
        if not any(rules) or len(rules) != len(entries):
            return None
        if len({repr(rule) for rule in rules}) == 1:
            return rules[0]
        return None if isinstance(value, Mapping) else Entries(tuple(rules))

    def _rule_of_some(self, dim: int, lengths: Lengths, choice: Choice) -> Split | None:
        """Return the rule for a tensor with an entry for some tokens: all but a fixed number of the first or last."""
        small, large = self.start.tokens
        if small - lengths[0] == large - lengths[1] > 0:
            return Split(dim, like=self.segment, only="last" if choice.text_first else "first")
        return None

    def _mask_rule(self, mask: MaskRecord, larger: MaskRecord, choice: Choice) -> SplitMask | None:
        if mask.derived or mask.lengths == larger.lengths:
            return None
        queries, keys = (
            self._segments_of(lengths, choice) for lengths in zip(mask.lengths, larger.lengths, strict=True)
        )
        if queries is None or keys is None:
            return None
        return SplitMask(queries, None if keys == queries else keys)

    def _segments_of(self, lengths: Lengths, choice: Choice) -> tuple[str, ...] | None:
        """Return the segments that make up a sequence of ``lengths`` in the two calls; None if no segments fit."""
        small, large = self.start.tokens
        if lengths in ((small, large), self.start.entries):
            return (self.segment,)
        if lengths[0] == lengths[1]:
            return (TEXT,)
        if lengths[0] - small == lengths[1] - large > 0:
            return (TEXT, self.segment) if choice.text_first else (self.segment, TEXT)
        return None

    def _attention(
        self, choice: Choice, ending: ModuleCall
    ) -> tuple[tuple[str, ...], dict[str, tuple[Attention, ...]], list[str]] | None:
        """Return the joint order, the rules of modules whose attention differs from it, and the reasons.

        None if the lengths of an attention call fit no combination of segments.
        """
        began = self.calls()[0][0].began
        by_module: dict[str, list[Attention]] = {}
        for observed, larger in zip(self.small.attention, self.large.attention, strict=False):
            if not began < observed.time < ending.ended:
                continue
            queries = self._segments_of((observed.queries, larger.queries), choice)
            keys = self._segments_of((observed.keys, larger.keys), choice)
            if keys == (TEXT,) and queries is None:
                # Some of the tokens attend to replicated keys, for example those of one frame. Count these queries as
                # the segment of all tokens: if keys are replicated, attention does not depend on the number of queries.
                queries = (self.segment,)
            if queries is None or keys is None:
                return None
            masked = observed.mask is not None and observed.mask[-1] == observed.keys
            mask = choice.mask if masked and self.segment in keys else None
            call = Attention(queries, None if keys == queries else keys, mask)
            by_module.setdefault(observed.name, []).append(call)
        inside = sum(len(calls) for calls in by_module.values())
        for calls in by_module.values():
            # In a plan the last entry applies to all further calls.
            while len(calls) > 1 and calls[-1] == calls[-2]:
                calls.pop()
        alone = [calls[0].queries for calls in by_module.values() if len(calls) == 1 and calls[0].keys is None]
        orders = [order for order in alone if self.segment in order]
        joint = max(orders, key=orders.count) if orders else (self.segment,)
        patterns: dict[str, dict[str, tuple[Attention, ...]]] = {}
        for name, calls in by_module.items():
            patterns.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), {})[name] = tuple(calls)
        attention: dict[str, tuple[Attention, ...]] = {}
        for pattern, of_pattern in patterns.items():
            equal = len({repr(calls) for calls in of_pattern.values()}) == 1
            named = {pattern: next(iter(of_pattern.values()))} if equal else of_pattern
            attention.update({name: calls for name, calls in named.items() if calls != (Attention(joint),)})
        between = f"{inside} of {len(self.small.attention)} attention calls are between sharding and gathering"
        reasons = [f"{between}; their lengths are those of {' + '.join(joint)}."]
        for name, rules in attention.items():
            words = "; then ".join(f"{' + '.join(x.queries)} to {' + '.join(x.keys or x.queries)}" for x in rules)
            reasons.append(f"{name}: its lengths are those of {words}.")
        return joint, attention, reasons
