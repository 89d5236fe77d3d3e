"""Derive variants of a plan that shard text as well as the image, from a plan that replicates text.

Only ``search.py`` calls it, and checks the variants. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from para_core.adapters.propose.candidates import Candidate
from para_core.adapters.propose.records import TensorRecord, tensors_of
from para_core.adapters.propose.region import TEXT, ObservedRegion, TextParameter
from para_core.adapters.propose.start import grown_dims
from para_core.plans.plan import Entries, Plan, ShardRule, Split

_WHY = (
    "text, in a joint sequence with the tokens. Sharding it leaves each rank less to compute; text='replicate' sends "
    "less. Both were exact; measure which one is faster"
)


def variants_with_sharded_text(region: ObservedRegion, plan: Plan) -> Iterator[Candidate]:
    """Yield variants of ``plan`` that also shard the text of its joint sequences; nothing if it has no such
    text.

    The first variant shards text at the inputs of the first block. The second shards everything with an entry
    per token at the inputs of the model, so that what the model computes from both (such as positions) is
    sharded too.
    """
    text = region.text_parameter()
    if text is None or plan.splits(TEXT):
        return
    at_blocks = _shard_at_blocks(region, plan, text)
    if at_blocks is not None:
        yield Candidate(at_blocks, (f"{region.start.block}({text.name}): {_WHY}.",))
    inputs = _input_rules(region, text.length)
    if {rule.segment for rule in inputs.values()} == {region.segment, TEXT}:
        names = [name for name, rule in inputs.items() if rule.segment == TEXT]
        yield Candidate(replace(plan, inputs=dict(inputs), inner={}), (f"{' and '.join(names)}: {_WHY}.",))


def _shard_at_blocks(region: ObservedRegion, plan: Plan, text: TextParameter) -> Plan | None:
    """Return ``plan`` with text sharded at the first block.

    None if one tensor has entries for both text and image.
    """
    inner: dict[str, dict[str | int, ShardRule]] = {name: dict(rules) for name, rules in plan.inner.items()}
    if any(_joins_text(rule) for rules in inner.values() for rule in rules.values()):
        return None
    # The first block has no rule left if an answer shards the tokens elsewhere.
    inner.setdefault(region.start.block, {})[text.name] = Split(text.dim, segment=TEXT)
    for call, _ in region.calls():
        if call.block_list is None:
            continue
        for name, value in call.arguments.items():
            if (call.name, name) == (region.start.block, text.name):
                continue
            text_rule = _text_rule(value, text.length)
            if text_rule is not None:
                rules = inner.setdefault(f"{call.block_list}.*", {})
                rules[name] = _merge_entries(rules.get(name), text_rule)
    return replace(plan, inner=inner)


def _merge_entries(image_rule: ShardRule | None, text_rule: Split | Entries) -> Split | Entries:
    """Return the rule for an argument that holds both, such as a tuple of the positions of image and of text."""
    if not isinstance(image_rule, Entries) or not isinstance(text_rule, Entries):
        return text_rule
    pairs = zip(image_rule.cuts, text_rule.cuts, strict=True)
    return Entries(tuple([image or text for image, text in pairs]))


def _joins_text(rule: ShardRule | None) -> bool:
    """Whether ``rule`` splits a tensor that has entries for replicated text before or after the tokens."""
    if isinstance(rule, Entries):
        return any(_joins_text(entry) for entry in rule.cuts)
    return isinstance(rule, Split) and (rule.after is not None or rule.then_replicated)


def _text_rule(value: Any, length: int) -> Split | Entries | None:
    """Return the rule for a value that has an entry per text token and is not computed from the image; else
    None.
    """
    if isinstance(value, TensorRecord):
        dims = [dim for dim, size in enumerate(value.shape) if size == length]
        if len(dims) != 1 or value.derived:
            return None
        return Split(dims[0], like=TEXT)
    if not isinstance(value, (list, tuple)):
        return None
    rules = [_text_rule(entry, length) for entry in value]
    splits = [rule for rule in rules if isinstance(rule, Split)]
    if not splits:
        return None
    if len(splits) == len(rules) and len({repr(rule) for rule in splits}) == 1:
        return splits[0]
    return Entries(tuple([rule if isinstance(rule, Split) else None for rule in rules]))


def _input_rules(region: ObservedRegion, length: int) -> dict[str, Split]:
    """Return the rules of the arguments of the model that have an entry per token, of the image or of text."""
    rules: dict[str, Split] = {}
    for name, value in region.small.inputs.items():
        tensor_rules = _rules_of_tensors(value, region.large.inputs.get(name), region, length)
        if len(tensor_rules) == 1:
            rules[name] = tensor_rules.pop()
    return rules


def _rules_of_tensors(value: Any, larger: Any, region: ObservedRegion, length: int) -> set[Split]:
    """Return the rules of the tensors in an argument, given in both calls; ``length`` is that of the text."""
    rules: set[Split] = set()
    for record, larger_record in zip(tensors_of(value), tensors_of(larger), strict=False):
        grown, dims = grown_dims(record, larger_record), region.start.token_dims(record, larger_record)
        if len(dims) == len(grown) == 1:
            rules.add(Split(dims[0], segment=region.segment))
        text_dims = [dim for dim, size in enumerate(record.shape) if size == length and not grown]
        if len(text_dims) == 1:
            rules.add(Split(text_dims[0], segment=TEXT))
    return rules
