"""Guess of which segments the queries and keys of attention calls consist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from para_core.adapters.propose.choices import Choice
from para_core.adapters.propose.records import ObservedAttention
from para_core.adapters.propose.region import TEXT, Ending, ObservedRegion
from para_core.plans.plan import Attention


@dataclass(frozen=True)
class AttentionGuess:
    """The joint order, the rules of modules whose attention differs from it, and the reasons as sentences."""

    joint_order: tuple[str, ...]
    rules: Mapping[str, tuple[Attention, ...]]
    reasons: tuple[str, ...]


def guess_attention(region: ObservedRegion, choice: Choice, ending: Ending) -> AttentionGuess | None:
    """Return the attention rules of a plan whose tokens are gathered at ``ending``.

    None if the lengths of an attention call fit no combination of segments.
    """
    by_module: dict[str, list[Attention]] = {}
    num_calls = 0
    for observed, larger in zip(region.small.attention, region.large.attention, strict=False):
        if not region.began < observed.time < ending.call.ended:
            continue
        attention = _attention_rule(region, choice, observed, larger)
        if attention is None:
            return None
        by_module.setdefault(observed.name, []).append(attention)
        num_calls += 1
    calls_of_modules = {name: _without_repetitions(calls) for name, calls in by_module.items()}
    joint_order = _joint_order(region.segment, [*calls_of_modules.values()])
    rules = {
        name: calls
        for name, calls in _by_pattern(calls_of_modules).items()
        if calls != (Attention(joint_order),)
    }
    between = (
        f"{num_calls} of {len(region.small.attention)} attention calls are between sharding and gathering"
    )
    reasons = [f"{between}; their lengths are those of {' + '.join(joint_order)}."]
    for name, calls in rules.items():
        lengths = [f"{' + '.join(call.queries)} to {' + '.join(call.keys or call.queries)}" for call in calls]
        reasons.append(f"{name}: its lengths are those of {'; then '.join(lengths)}.")
    return AttentionGuess(joint_order, rules, tuple(reasons))


def _attention_rule(
    region: ObservedRegion, choice: Choice, observed: ObservedAttention, larger: ObservedAttention
) -> Attention | None:
    """Return the rule for one call; None if its lengths fit no combination of segments."""
    queries = region.segments_of((observed.queries, larger.queries), text_first=choice.text_first)
    keys = region.segments_of((observed.keys, larger.keys), text_first=choice.text_first)
    if keys == (TEXT,) and queries is None:
        # Some of the tokens attend to replicated keys, for example those of one frame. Count these queries as
        # the segment of all tokens: if keys are replicated, attention does not depend on the number of
        # queries.
        queries = (region.segment,)
    if queries is None or keys is None:
        return None
    mask = None
    if observed.mask is not None and observed.mask[-1] == observed.keys and region.segment in keys:
        mask = choice.mask
    if keys == queries:
        return Attention(queries, None, mask)
    return Attention(queries, keys, mask)


def _without_repetitions(calls: Sequence[Attention]) -> tuple[Attention, ...]:
    """Return ``calls`` without equal ones at the end: in a plan the last entry applies to all further calls."""
    end = len(calls)
    while end > 1 and calls[end - 1] == calls[end - 2]:
        end -= 1
    return tuple(calls[:end])


def _joint_order(segment: str, calls_of_modules: Sequence[tuple[Attention, ...]]) -> tuple[str, ...]:
    """Return the segments of most modules that attend to what they attend with, and to ``segment``."""
    orders = [
        calls[0].queries
        for calls in calls_of_modules
        if len(calls) == 1 and calls[0].keys is None and segment in calls[0].queries
    ]
    return max(orders, key=orders.count, default=(segment,))


def _by_pattern(calls_of_modules: Mapping[str, tuple[Attention, ...]]) -> dict[str, tuple[Attention, ...]]:
    """Return the calls by a name in which numbers of blocks are ``*``, if all modules of this name make equal
    calls.
    """
    patterns: dict[str, dict[str, tuple[Attention, ...]]] = {}
    for name, calls in calls_of_modules.items():
        patterns.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), {})[name] = calls
    rules: dict[str, tuple[Attention, ...]] = {}
    for pattern, by_name in patterns.items():
        different = {repr(calls): calls for calls in by_name.values()}
        if len(different) == 1:
            rules[pattern] = next(iter(different.values()))
        else:
            rules.update(by_name)
    return rules
