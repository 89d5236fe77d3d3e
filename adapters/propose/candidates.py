"""Comparing calls of two sizes: which blocks, tensors and attention calls grow with the tokens, and what plans that leaves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal

from torch import nn

from para_core.adapters.propose.observe import ModuleCall, ObservedCall, Seen, observe
from para_core.plans.plan import Attention, Entries, FirstTokens, Gather, LastTokens, Plan, Replicate, ShardRule, Split

Pair = tuple[int, int]
# A segment that every rank keeps.
WHOLE = "text"


@dataclass(frozen=True)
class Start:
    """Where a region may begin: the first block of a list, or a module around all blocks, and its streams of tokens.

    Args:
        block: name of the module.
        tokens: how many tokens a stream has in the one call and in the other.
        streams: the parameters that hold them.
    """

    block: str
    tokens: Pair
    streams: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Choice:
    """What sizes alone do not tell, so it is tried.

    Args:
        whole_first: in a joint sequence, what every rank keeps comes before the tokens.
        split_masks: masks (and what else is no float) that blocks are given are split with the tokens, or replicated.
        keys: how attention reads a mask (:class:`Attention`).
        numbers: how a number that grows counts tokens.
    """

    whole_first: bool
    split_masks: bool
    keys: Literal["keys", "pairs"] | None
    numbers: type[FirstTokens] | type[LastTokens] = FirstTokens


# Of masks that are replicated, and of masks that are split: "keys" first, for by its size a mask of one token would be for all.
_READINGS: Mapping[bool, tuple[Literal["keys"] | None, ...]] = {False: (None, "keys"), True: ("keys", None)}
_BY_MASKS = (
    *[
        Choice(whole_first, split_masks, keys)
        for whole_first, split_masks in product((True, False), (False, True))
        for keys in _READINGS[split_masks]
    ],
    Choice(whole_first=False, split_masks=False, keys="pairs"),
)
CHOICES = tuple(replace(choice, numbers=numbers) for numbers in (FirstTokens, LastTokens) for choice in _BY_MASKS)


@dataclass(frozen=True)
class Candidate:
    """A plan that fits what was seen, and why each entry of it is there."""

    plan: Plan
    reasons: tuple[str, ...]


def tensors_of(value: Any) -> list[Seen]:
    if isinstance(value, Seen):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [one for item in value for one in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def _pairs(value: Any, other: Any) -> list[tuple[Any, Any]]:
    """Entries of two lists or dicts that belong together; none where they are nothing of the kind, or unlike each other."""
    if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
        return [(one, other[key]) for key, one in value.items()]
    both = isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)) and len(value) == len(other)
    return [*zip(value, other, strict=True)] if both else []


def grown_dims(small: Seen, large: Seen) -> dict[int, Pair]:
    """The dims that differ, each with its two lengths."""
    if len(small.shape) != len(large.shape):
        return {}
    pairs = zip(small.shape, large.shape, strict=True)
    return {dim: (one, other) for dim, (one, other) in enumerate(pairs) if one != other}


def streams_of(calls: list[ModuleCall], index: int) -> tuple[str, ...]:
    """The parameters of a block whose changed values it returns, in that order; "" where it returns something else.

    The next block is given the same tensors; else shapes tell, unless the next block is given what this one was.
    """
    call = calls[index]
    given: dict[str, Seen] = {name: seen for name, seen in call.given.items() if isinstance(seen, Seen)}
    following = calls[index + 1].given if index + 1 < len(calls) else {}
    found: list[str] = []
    for output in tensors_of(call.returned):
        handed = [name for name, seen in following.items() if getattr(seen, "identity", None) == output.identity]
        alike = [
            name
            for name, seen in given.items()
            if seen.shape == output.shape
            and name not in found
            and getattr(following.get(name), "identity", None) != seen.identity
        ]
        found.append((handed or alike or [""])[0])
    return tuple(found)


def starts(small: ObservedCall, large: ObservedCall) -> Iterator[Start]:
    """Where a region may begin, in the order of time: each leaves less of the attention to all ranks alike.

    Modules around blocks come last: blocks may be called by more than a list of them, and then have no streams.
    """
    for name in dict.fromkeys(call.block_list for call in small.calls if call.block_list is not None):
        calls, others = small.of_list(name), large.of_list(name)
        if others and _attends(small, calls[0].began, calls[-1].ended):
            yield from _start(calls[0], others[0], streams_of(calls, 0))
    outer = [call for call in small.calls if call.block_list is None and _attends(small, call.began, call.ended)]
    for call in sorted(outer, key=lambda call: call.began):
        other = next((one for one in large.calls if one.name == call.name), None)
        floating = [
            parameter
            for parameter, seen in call.given.items()
            if isinstance(seen, Seen) and seen.dtype.is_floating_point and len(seen.shape) == 3
        ]
        if other is not None:
            yield from _start(call, other, floating)


def _attends(seen: ObservedCall, began: int, ended: int) -> bool:
    return any(began < one.time < ended for one in seen.attention)


def _start(call: ModuleCall, other: ModuleCall, streams: Iterable[str]) -> Iterator[Start]:
    growing: list[tuple[str, int, Pair]] = []
    for stream in streams:
        seen, larger = call.given.get(stream), other.given.get(stream)
        if isinstance(seen, Seen) and isinstance(larger, Seen):
            dims = grown_dims(seen, larger)
            growing += [(stream, dim, pair) for dim, pair in dims.items() if len(dims) == 1]
    if growing:
        # Of several streams that grow, the one that is named as all of diffusers names it, else the first.
        _, dim, tokens = next((one for one in growing if one[0] == "hidden_states"), growing[0])
        yield Start(call.name, tokens, tuple(one[0] for one in growing if one[1:] == (dim, tokens)), dim)


@dataclass(frozen=True)
class Region:
    """What happens from a :class:`Start` on: the calls of one size, in which what is derived is marked, and of the other."""

    start: Start
    small: ObservedCall
    large: ObservedCall
    segment: str

    def calls(self) -> list[tuple[ModuleCall, ModuleCall]]:
        pairs = [*zip(self.small.calls, self.large.calls, strict=False)]
        began = next(call.began for call, _ in pairs if call.name == self.start.block)
        return sorted([pair for pair in pairs if pair[0].began >= began], key=lambda pair: pair[0].began)

    def candidates(self) -> Iterator[Candidate]:
        """Plans that fit what was seen, the likeliest first."""
        seen: set[str] = set()
        for choice in CHOICES:
            for ending in self._endings():
                candidate = self._candidate(choice, *ending)
                if candidate is not None and repr(candidate.plan) not in seen:
                    seen.add(repr(candidate.plan))
                    yield candidate

    def _endings(self) -> list[tuple[ModuleCall, int, int]]:
        """Calls behind which tokens may be gathered, the latest first: each with the index of its output and the dim.

        Those whose output is larger than the tokens come last: logits over a vocabulary cost more to gather than what they are made
        of, and some models compute them for the last token alone.
        """
        calls = self.calls()
        last_block = max((call.ended for call, _ in calls if call.block_list is not None), default=0)
        found = []
        for call, other in calls:
            if call.ended < last_block:
                continue
            for index, (seen, larger) in enumerate(
                zip(tensors_of(call.returned), tensors_of(other.returned), strict=False)
            ):
                dims = [dim for dim, pair in grown_dims(seen, larger).items() if pair == self.start.tokens]
                if seen.derived and len(dims) == 1:
                    found.append((call, index, dims[0], prod(seen.shape) > self._size()))
                    break
        latest_first = found[::-1]
        return [ending[:3] for larger in (False, True) for ending in latest_first if ending[3] is larger]

    def _size(self) -> int:
        """Elements of the tokens where the region begins."""
        call = next(call for call, _ in self.calls() if call.name == self.start.block)
        return prod(call.given[self.start.streams[0]].shape)

    def _candidate(self, choice: Choice, ending: ModuleCall, index: int, dim: int) -> Candidate | None:
        inner: dict[str, dict[str | int, ShardRule]] = {}
        reasons = []
        for stream in self.start.streams:
            inner.setdefault(self.start.block, {})[stream] = Split(self.start.dim, segment=self.segment)
            small, large = self.start.tokens
            reasons.append(
                f"{self.start.block}({stream}): the tokens on their way through the blocks, {small} of them in one call and "
                f"{large} in the other."
            )
        for (name, parameter), (cut, why) in self._companions(choice).items():
            if isinstance(cut, Replicate):
                inner[self.start.block][parameter] = cut
            elif parameter not in inner.get(name, {}):
                inner.setdefault(name, {})[parameter] = cut
            reasons.append(why)
        joint, attention, why_attention = self._attention(choice, ending)
        if joint is None:
            return None
        behind = self._name_of(ending)
        gather = Gather(dim, self.segment)
        rule = gather if index == 0 else (*[None] * index, gather)
        reasons.append(f"{behind}: behind it tokens are gathered, for what it returns still has one entry for each.")
        inputs = self._met()
        reasons += [f"{name}: the model joins it to the tokens between its blocks." for name in inputs]
        plan = Plan(inputs, {behind: rule}, joint, inner, attention)
        return Candidate(plan, (*reasons, *why_attention))

    def _name_of(self, call: ModuleCall) -> str:
        """The last block of a list by its place from the end: another checkpoint of the model may have more."""
        of_list = [] if call.block_list is None else self.small.of_list(call.block_list)
        return f"{call.block_list}.-1" if of_list and call.name == of_list[-1].name else call.name

    # -- what goes with the tokens

    def _met(self) -> dict[str, ShardRule]:
        """Arguments of the model that it joins to the tokens outside of its blocks, and that are as long as these."""
        found: dict[str, ShardRule] = {}
        for name in sorted(self.small.met):
            pairs = zip(tensors_of(self.small.inputs[name]), tensors_of(self.large.inputs[name]), strict=False)
            dims = [
                dim for one, other in pairs for dim, pair in grown_dims(one, other).items() if pair == self.start.tokens
            ]
            if len(set(dims)) == 1:
                found[name] = Split(dims[0], like=self.segment)
        return found

    def _companions(self, choice: Choice) -> dict[tuple[str, str], tuple[ShardRule, str]]:
        """By module and parameter of a block: what is as long as the tokens, and was not made from them."""
        needed: dict[tuple[str, str], dict[str, ShardRule]] = {}
        of_list: dict[str, set[str]] = {}
        for call, other in self.calls():
            owner = call.block_list or (call.name if call.name == self.start.block else None)
            if owner is None:
                continue
            of_list.setdefault(owner, set()).add(call.name)
            for parameter, value in call.given.items():
                if call.name == self.start.block and parameter in self.start.streams:
                    continue
                cut = self._cut(parameter, value, other.given.get(parameter), choice)
                if cut is not None:
                    needed.setdefault((owner, parameter), {})[call.name] = cut
        found: dict[tuple[str, str], tuple[ShardRule, str]] = {}
        for (block_list, parameter), cuts in needed.items():
            same = len({repr(cut) for cut in cuts.values()}) == 1
            everywhere = same and len(cuts) == len(of_list[block_list]) and block_list != self.start.block
            for name in [f"{block_list}.*"] if everywhere else cuts:
                cut = next(iter(cuts.values())) if everywhere else cuts[name]
                why = f"{name}({parameter}): has an entry for each token, and is not made from them."
                found[name, parameter] = (cut, why)
            found.update(self._replicated(cuts.values()))
        return found

    def _replicated(self, cuts: Any) -> dict[tuple[str, str], tuple[ShardRule, str]]:
        """Of which parameter of the first block the number of tokens is known that every rank keeps."""
        parts = [one for cut in cuts for one in (cut.cuts if isinstance(cut, Entries) else [cut])]
        if not any(isinstance(one, Split) and one.after for one in parts):
            return {}
        parameter, dim = self.whole_stream() or ("", 0)
        why = f"{self.start.block}({parameter}): does not grow; its tokens come first where both are in one tensor."
        return {(self.start.block, parameter): (Replicate(dim, WHOLE), why)} if parameter else {}

    def whole_stream(self) -> tuple[str, int] | None:
        """The parameter of the first block that holds the other tokens of a joint sequence, and their dim."""
        call = next(call for call, _ in self.calls() if call.name == self.start.block)
        joint = {
            one.keys - self.start.tokens[0]
            for one, other in zip(self.small.attention, self.large.attention, strict=False)
            if one.keys - self.start.tokens[0] == other.keys - self.start.tokens[1]
        }
        for parameter, seen in call.given.items():
            if isinstance(seen, Seen) and len(seen.shape) == 3 and parameter not in self.start.streams:
                for dim in (1, 0):
                    if seen.shape[dim] in joint:
                        return parameter, dim
        return None

    def length(self, stream: tuple[str, int]) -> int:
        """Tokens of what :meth:`whole_stream` found."""
        call = next(call for call, _ in self.calls() if call.name == self.start.block)
        parameter, dim = stream
        return int(call.given[parameter].shape[dim])

    def samples(self) -> int | None:
        """How many the call holds; None where the first block's tokens have no dim of them."""
        call = next(call for call, _ in self.calls() if call.name == self.start.block)
        shape = call.given[self.start.streams[0]].shape
        return int(shape[1 - self.start.dim]) if len(shape) == 3 and self.start.dim < 2 else None

    def _cut(self, parameter: str, value: Any, other: Any, choice: Choice) -> ShardRule | None:
        if isinstance(value, Seen) and isinstance(other, Seen):
            return self._cut_of_tensor(parameter, value, other, choice)
        if type(value) is int and type(other) is int and value != other:
            return choice.numbers(self.segment)
        return self._cut_of_entries(parameter, value, other, choice)

    def _cut_of_entries(self, parameter: str, value: Any, other: Any, choice: Choice) -> Split | Entries | None:
        """Of lists and dicts, in which only the outermost list may have entries unlike each other."""
        cuts: list[Split | None] = []
        for one, larger in _pairs(value, other):
            cut = self._cut(parameter, one, larger, choice)
            if isinstance(cut, (Split, type(None))):
                cuts.append(cut)
        if not any(cuts) or len(cuts) != len(value):
            return None
        if len({repr(cut) for cut in cuts}) == 1:
            return cuts[0]
        return None if isinstance(value, Mapping) else Entries(tuple(cuts))

    def _cut_of_tensor(self, parameter: str, seen: Seen, other: Seen, choice: Choice) -> Split | None:
        dims = grown_dims(seen, other)
        if seen.derived or len(dims) != 1:
            return None
        if not choice.split_masks and ("mask" in parameter or not seen.dtype.is_floating_point):
            return None
        dim, (small, large) = next(iter(dims.items()))
        more = small - self.start.tokens[0]
        if more != large - self.start.tokens[1] or more < 0:
            return None
        if more == 0:
            return Split(dim, like=self.segment)
        if choice.whole_first:
            return Split(dim, like=self.segment, after=WHOLE)
        return Split(dim, like=self.segment, then_replicated=True)

    # -- attention

    def _consists_of(self, pair: Pair, choice: Choice) -> tuple[str, ...] | None:
        small, large = self.start.tokens
        if pair == (small, large):
            return (self.segment,)
        if pair[0] == pair[1]:
            return (WHOLE,)
        if pair[0] - small == pair[1] - large > 0:
            return (WHOLE, self.segment) if choice.whole_first else (self.segment, WHOLE)
        return None

    def _attention(
        self, choice: Choice, ending: ModuleCall
    ) -> tuple[tuple[str, ...] | None, dict[str, tuple[Attention, ...]], list[str]]:
        """The joint order, what other modules attend to, and why; no joint order where sizes fit nothing."""
        began = self.calls()[0][0].began
        by_module: dict[str, list[Attention]] = {}
        for one, other in zip(self.small.attention, self.large.attention, strict=False):
            if not began < one.time < ending.ended:
                continue
            queries = self._consists_of((one.queries, other.queries), choice)
            keys = self._consists_of((one.keys, other.keys), choice)
            if keys == (WHOLE,) and queries is None:
                # A part of the tokens, which attends to what every rank has: nothing depends on how many they are.
                queries = (self.segment,)
            if queries is None or keys is None:
                return None, {}, []
            masked = one.mask is not None and one.mask[-1] == one.keys
            mask = choice.keys if masked and self.segment in keys else None
            found = Attention(queries, None if keys == queries else keys, mask)
            by_module.setdefault(one.name, []).append(found)
        alike = {name: _shortest(calls) for name, calls in by_module.items()}
        alone = [calls[0].queries for calls in alike.values() if len(calls) == 1 and calls[0].keys is None]
        mixed = [order for order in alone if self.segment in order]
        joint = max(mixed, key=mixed.count) if mixed else (self.segment,)
        patterns: dict[str, dict[str, tuple[Attention, ...]]] = {}
        for name, calls in alike.items():
            patterns.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), {})[name] = calls
        attention: dict[str, tuple[Attention, ...]] = {}
        for pattern, of_pattern in patterns.items():
            different = {repr(calls) for calls in of_pattern.values()}
            named = {pattern: next(iter(of_pattern.values()))} if len(different) == 1 else of_pattern
            attention.update({name: calls for name, calls in named.items() if calls != (Attention(joint),)})
        shared = sum(len(calls) for calls in by_module.values())
        within = f"{shared} of {len(self.small.attention)} attention calls are between sharding and gathering"
        why = [f"{within}, judged by their lengths among {' + '.join(joint)}."]
        why += [f"{name}: its lengths are those of {_in_words(calls)}." for name, calls in attention.items()]
        return joint, attention, why


def _shortest(calls: list[Attention]) -> tuple[Attention, ...]:
    """The last stands for all further calls."""
    while len(calls) > 1 and calls[-1] == calls[-2]:
        calls = calls[:-1]
    return tuple(calls)


def _in_words(calls: tuple[Attention, ...]) -> str:
    return "; then ".join(" + ".join(one.queries) + " to " + " + ".join(one.keys or one.queries) for one in calls)


def region(module: nn.Module, inputs: Mapping[str, Any], large: ObservedCall, start: Start, segment: str) -> Region:
    """What happens from ``start`` on in ``module(**inputs)``, beside a larger call."""
    return Region(start, observe(module, inputs, start.block, start.streams), large, segment)
