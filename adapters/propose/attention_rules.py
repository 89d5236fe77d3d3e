"""Guess of which segments the queries and keys of attention calls consist.

A guess may be wrong: :class:`~para_core.adapters.propose.search.Search` proposes a plan only if it is exact
when :class:`~para_core.adapters.propose.plan_check.PlanCheck` runs it. So a mistake here costs a proposal,
and never a wrong one. A length that is equal in both calls counts as text
(:meth:`ObservedRegion.segments_of`), also if it is that of frames or of another dim.

:mod:`para_core.adapters.propose.candidates` calls it. Tests: tests/adapters/propose/test_attention_rules.py,
and with models test_structures.py.
"""

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
    """The joint order, the rules of modules whose attention differs from it, and the reasons, in the form of
    those of a ``Candidate``; that of the joint order begins with no name.
    """

    joint_order: tuple[str, ...]
    rules: Mapping[str, tuple[Attention, ...]]
    reasons: tuple[str, ...]


def guess_attention(region: ObservedRegion, choice: Choice, ending: Ending) -> AttentionGuess | None:
    """Return the attention rules of a plan whose tokens are gathered at ``ending``.

    None if the lengths of an attention call fit no combination of segments, or other modules attend in the
    larger call, or in another order: lengths can then not be compared.
    """
    by_module: dict[str, list[Attention]] = {}
    num_calls, began = 0, region.began
    for observed, larger in region.attention_pairs():
        if not began < observed.time < ending.call.ended:
            continue
        if observed.name != larger.name:
            return None
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
    order = " + ".join(joint_order)
    reasons = [f"{between}; they attend with {order} unless a line for their module says otherwise."]
    for name, calls in rules.items():
        reasons.append(f"{name}: {'; then '.join([_in_words(call) for call in calls])}.")
    return AttentionGuess(joint_order, rules, tuple(reasons))


def _in_words(call: Attention) -> str:
    """Return what was observed in ``call``, as part of a sentence about its module."""
    queries = " + ".join(call.queries)
    if call.keys == (TEXT,):
        # The length of the queries may be another one (_attention_rule).
        return (
            f"the length of its keys does not grow, like that of {TEXT}, and its queries count as {queries}"
        )
    return f"its lengths are those of {queries} to {' + '.join(call.keys or call.queries)}"


def _attention_rule(
    region: ObservedRegion, choice: Choice, observed: ObservedAttention, larger: ObservedAttention
) -> Attention | None:
    """Return the rule for one call, ``observed``, which is ``larger`` in the larger call.

    None if its lengths fit no combination of segments.
    """
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
    # A mask with one column for all keys is broadcast, and one without sharded keys is not sharded: both need no
    # form.
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
    """Return the most frequent order of segments among modules with self-attention (queries and keys are the
    same tokens) that includes ``segment``: the first one of equally frequent ones, and ``segment`` alone if
    there is none. A module whose calls differ does not count.
    """
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
        different = set(by_name.values())
        if len(different) == 1:
            rules[pattern] = different.pop()
        else:
            rules.update(by_name)
    return rules
