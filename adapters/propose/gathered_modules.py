"""Derive variants of a plan in which a module inside the blocks, such as a rotary embedding, is given all
tokens: they are gathered before it, and sharded again after it.

``search.py`` calls it for the module in which a plan first differs, and checks the variant. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters.propose.candidates import Candidate
from para_core.adapters.propose.observe import observe
from para_core.adapters.propose.records import ModuleCall, TensorRecord, output_tensors
from para_core.adapters.propose.region import ObservedRegion
from para_core.instance.private_class import original_class
from para_core.plans.plan import Gather, Plan, ShardRule, Split


def with_gathered_module(
    module: nn.Module, region: ObservedRegion, plan: Plan, name: str, examples: Sequence[Mapping[str, Any]]
) -> Candidate | None:
    """Return ``plan`` with tokens gathered before the submodule ``name``, and sharded after it if it returns
    tokens. Runs the model with each of ``examples``, the smaller one first.

    Returns None if the submodule calls attention, its sizes do not show which dims hold the tokens, or
    ``plan`` has rules for it.
    """
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    if not name or pattern in plan.inner:
        return None
    start = region.start
    observed = [observe(module, inputs, start.block, start.streams, inside=name) for inputs in examples]
    calls = [[call for call in record.calls if call.name == name] for record in observed]
    if not calls[0] or any(observed[0].attends([call]) for call in calls[0]):
        return None
    rules: dict[str | int, ShardRule] = {}
    for pair in zip(*calls, strict=False):
        rules_of_call = _rules(region, plan, pair)
        if rules_of_call is None:
            return None
        if any(rules.setdefault(key, rule) != rule for key, rule in rules_of_call.items()):
            return None
    if not any(isinstance(key, str) for key in rules):
        return None
    reason = (
        f"{pattern}: failed, or differed, with a rank's tokens, so these are gathered before it, and what it returns "
        "for each is sharded again. Every rank computes it for all tokens."
    )
    return Candidate(replace(plan, inner={**plan.inner, pattern: rules}), (reason,))


def computes_much(module: nn.Module, region: ObservedRegion, name: str) -> bool:
    """Whether the submodule ``name`` is a part of the blocks and has weights of layers of torch.

    Without them it computes little for each token. Outside of the blocks it is called only a few times.
    """
    lists = [
        block_list
        for block_list in region.small.list_names()
        if any(region.small.attends([call]) for call in region.small.calls_in_list(block_list))
    ]
    if not any(name.startswith(f"{block_list}.") for block_list in lists):
        return False
    layers = [
        x
        for x in module.get_submodule(name).modules()
        if original_class(x).__module__.startswith("torch.nn.")
    ]
    return any([*layer.parameters()] for layer in layers)


def _rules(
    region: ObservedRegion, plan: Plan, calls: Sequence[ModuleCall]
) -> dict[str | int, ShardRule] | None:
    """Return the rules for the tensors of a call, given in one or both examples.

    None if the tokens' dim is unknown.
    """
    rules: dict[str | int, ShardRule] = {}
    for parameter in calls[0].arguments:
        values = [call.arguments.get(parameter) for call in calls]
        if isinstance(values[0], TensorRecord) and values[0].derived:
            gather = _gather_rule(
                region, plan, [value for value in values if isinstance(value, TensorRecord)]
            )
            if gather is None:
                return None
            rules[parameter] = gather
    outputs = [
        {(output.index, output.path): output.record for output in output_tensors(call.output)}
        for call in calls
    ]
    for index, path in outputs[0]:
        records = [
            records_of_call[index, path] for records_of_call in outputs if (index, path) in records_of_call
        ]
        gather = _gather_rule(region, plan, records)
        if gather is None:
            continue
        if path:
            return None
        rules[index] = Split(
            gather.dim,
            like=region.segment,
            after_replicated=gather.after_replicated,
            then_replicated=gather.then_replicated,
        )
    return rules


def _gather_rule(region: ObservedRegion, plan: Plan, records: Sequence[TensorRecord]) -> Gather | None:
    """Return the rule that gathers the tokens of a tensor, alone or in a joint sequence with replicated text.

    With records of two examples the dim of the tokens grows. With one record, it is the last that is as long
    as they.
    """
    text = region.text_parameter()
    sizes = [*zip(*[record.shape for record in records], strict=False)]
    numbers_of_text = [0] if text is None else [0, text.length]
    for added in numbers_of_text:
        lengths = tuple([number + added for number in region.start.tokens])[: len(records)]
        dims = [dim for dim, sizes_of_dim in enumerate(sizes) if sizes_of_dim == lengths]
        if dims:
            # An answer may leave joint_order empty.
            image_last = plan.joint_order[-1:] == (region.segment,)
            return Gather(
                dims[-1] - len(sizes),
                region.segment,
                after_replicated=added > 0 and image_last,
                then_replicated=added > 0 and not image_last,
            )
    return None
