"""Make candidate plans from the observed sizes of a region.

``search.py`` tries them. The rules come from ``rules.py`` and ``attention_rules.py``; a candidate is not
checked here. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from para_core.adapters.propose.attention_rules import guess_attention
from para_core.adapters.propose.choices import Choice, all_choices
from para_core.adapters.propose.records import tensors_of
from para_core.adapters.propose.region import Ending, ObservedRegion
from para_core.adapters.propose.rules import guess_companions
from para_core.plans.plan import Gather, Plan, Replicate, ShardRule, Split

Rules = dict[str, dict[str | int, ShardRule]]


@dataclass(frozen=True)
class Candidate:
    """A plan that agrees with the observed sizes, and a sentence with the reason for each of its entries.

    A reason begins with the name of its entry, as ``answers`` of ``propose_plan`` have it, and ``": "``.
    ``search.py`` leaves out by it the reasons of guesses that an answer replaces, or that a variant drops.
    """

    plan: Plan
    reasons: tuple[str, ...]


def make_candidates(region: ObservedRegion) -> Iterator[Candidate]:
    """Yield the plans that agree with the observed sizes, the likeliest first, without repetitions."""
    plans: set[str] = set()
    for choice in all_choices():
        for ending in region.endings():
            candidate = _candidate(region, choice, ending)
            if candidate is not None and repr(candidate.plan) not in plans:
                plans.add(repr(candidate.plan))
                yield candidate


def _candidate(region: ObservedRegion, choice: Choice, ending: Ending) -> Candidate | None:
    """Return the plan of ``choice`` that gathers at ``ending``.

    None if attention has lengths that do not fit.
    """
    attention = guess_attention(region, choice, ending)
    if attention is None:
        return None
    inner, reasons = _inner_rules(region, choice)
    name = _name_in_plan(region, ending)
    reasons.append(f"{name}: its output is gathered, because it has one entry for each token.")
    inputs, reasons_of_inputs = _joined_inputs(region)
    gathers: Gather | tuple[Gather | None, ...] = ending.gathers
    if len(ending.gathers) == 1 and ending.gathers[0] is not None:
        gathers = ending.gathers[0]
    plan = Plan(inputs, {name: gathers}, attention.joint_order, inner, attention.rules)
    return Candidate(plan, (*reasons, *reasons_of_inputs, *attention.reasons))


def _inner_rules(region: ObservedRegion, choice: Choice) -> tuple[Rules, list[str]]:
    """Return the rules of the streams and of what accompanies them, and the reasons."""
    start = region.start
    small, large = start.tokens
    split = Split(start.dim, segment=region.segment, together=start.together)
    inner: Rules = {start.block: dict.fromkeys(start.streams, split)}
    reasons = [
        f"{start.block}({stream}): a stream of tokens through the blocks, {small} in the smaller call and {large} in "
        "the larger one."
        for stream in start.streams
    ]
    for (name, parameter), guess in guess_companions(region, choice).items():
        rules = inner.setdefault(name, {})
        if isinstance(guess.rule, Replicate) or parameter not in rules:
            rules[parameter] = guess.rule
        reasons.append(guess.reason)
    return inner, reasons


def _name_in_plan(region: ObservedRegion, ending: Ending) -> str:
    """Return the name of the module of ``ending``.

    The last block of a list is named ``-1``, because another checkpoint of the model may have more blocks.
    """
    call = ending.call
    if call.block_list is not None and call.name == region.small.calls_in_list(call.block_list)[-1].name:
        return f"{call.block_list}.-1"
    return call.name


def _joined_inputs(region: ObservedRegion) -> tuple[dict[str, ShardRule], list[str]]:
    """Return the rules of the model's arguments that it joins to the tokens between its blocks, and the
    reasons.
    """
    inputs: dict[str, ShardRule] = {}
    reasons = []
    for parameter in sorted(region.small.joined_inputs):
        records, larger = [tensors_of(call.inputs[parameter]) for call in (region.small, region.large)]
        pairs = zip(records, larger, strict=False)
        dims = {dim for pair in pairs for dim in region.start.token_dims(*pair)}
        if len(dims) == 1:
            inputs[parameter] = Split(dims.pop(), like=region.segment)
            reasons.append(f"{parameter}: the model joins it to the tokens between its blocks.")
    return inputs, reasons
