"""Derive variants of a plan that shard text as well as the image, from a plan that replicates text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from para_core.adapters.propose.candidates import TEXT, Candidate, ObservedRegion, grown_dims
from para_core.adapters.propose.observe import TensorRecord, tensors_of
from para_core.plans.plan import Entries, Plan, ShardRule, Split

_WHY = (
    "text, in a joint sequence with the tokens. Sharding it leaves each rank less to compute; text='replicate' sends "
    "less. Both were exact; measure which one is faster"
)


def with_sharded_text(region: ObservedRegion, plan: Plan) -> Iterator[Candidate]:
    """Yield variants of ``plan`` that also shard the text of its joint sequences; nothing if it has no such text.

    The first variant shards text at the inputs of the first block. The second shards everything with an entry per token
    at the inputs of the model, so that what the model computes from both (such as positions) is sharded too.
    """
    text = region.text_parameter()
    if text is None or plan.cuts(TEXT):
        return
    parameter, dim, length = text
    at_blocks = _at_blocks(region, plan, parameter, dim, length)
    if at_blocks is not None:
        yield Candidate(at_blocks, (f"{region.start.block}({parameter}): {_WHY}.",))
    larger = region.large.inputs
    rules = {name: _input_rule(x, larger.get(name), region, length) for name, x in region.small.inputs.items()}
    inputs = {name: rule for name, rule in rules.items() if rule is not None}
    if {rule.segment for rule in inputs.values()} == {region.segment, TEXT}:
        names = [name for name, rule in inputs.items() if rule.segment == TEXT]
        yield Candidate(replace(plan, inputs=inputs, inner={}), (f"{' and '.join(names)}: {_WHY}.",))


def _at_blocks(region: ObservedRegion, plan: Plan, parameter: str, dim: int, length: int) -> Plan | None:
    """Return ``plan`` with text sharded at the first block. None if one tensor has entries for both text and image."""
    inner: dict[str, dict[str | int, ShardRule]] = {name: dict(rules) for name, rules in plan.inner.items()}
    if any(_joins_text(rule) for rules in inner.values() for rule in rules.values()):
        return None
    inner[region.start.block][parameter] = Split(dim, segment=TEXT)
    for call, _ in region.calls():
        if call.block_list is None:
            continue
        for name, value in call.arguments.items():
            if (call.name, name) == (region.start.block, parameter):
                continue
            text_rule = _text_rule(value, length)
            if text_rule is not None:
                rules = inner.setdefault(f"{call.block_list}.*", {})
                image_rule = rules.get(name)
                if isinstance(image_rule, Entries) and isinstance(text_rule, Entries):
                    # The argument holds both, such as a tuple of the positions of image and of text.
                    pairs = zip(image_rule.cuts, text_rule.cuts, strict=True)
                    text_rule = Entries(tuple(image or text for image, text in pairs))
                rules[name] = text_rule
    return replace(plan, inner=inner)


def _joins_text(rule: ShardRule | None) -> bool:
    if isinstance(rule, Entries):
        return any(_joins_text(entry) for entry in rule.cuts)
    return isinstance(rule, Split) and (rule.after is not None or rule.then_replicated)


def _text_rule(value: Any, length: int) -> Split | Entries | None:
    """Return the rule for a value that has an entry per text token and is not computed from the image; else None."""
    if isinstance(value, TensorRecord):
        dims = [dim for dim, size in enumerate(value.shape) if size == length]
        return Split(dims[0], like=TEXT) if len(dims) == 1 and not value.derived else None
    if not isinstance(value, (list, tuple)):
        return None
    rules = [_text_rule(entry, length) for entry in value]
    splits = [rule for rule in rules if isinstance(rule, Split)]
    if not splits:
        return None
    if len(splits) == len(rules) and len({repr(rule) for rule in splits}) == 1:
        return splits[0]
    return Entries(tuple(rule if isinstance(rule, Split) else None for rule in rules))


def _input_rule(value: Any, larger: Any, region: ObservedRegion, length: int) -> Split | None:
    rules: set[Split] = set()
    for record, larger_record in zip(tensors_of(value), tensors_of(larger), strict=False):
        grown, dims = grown_dims(record, larger_record), region.start.token_dims(record, larger_record)
        if len(dims) == len(grown) == 1:
            rules.add(Split(dims[0], segment=region.segment))
        text_dims = [dim for dim, size in enumerate(record.shape) if size == length and not grown]
        if len(text_dims) == 1:
            rules.add(Split(text_dims[0], segment=TEXT))
    return rules.pop() if len(rules) == 1 else None
