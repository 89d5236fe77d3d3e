"""Rules: how much a step differs from an earlier one, told from what its first block does.

A rule is a value of :class:`Rule`. What it compares, ``now`` and ``before``, are the first-block residuals ``[B, S, C]`` of
this rank's tokens; it gives sums over them, which the ranks add up, and a number made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """
    Args:
        name: in reports and messages.
        sums: of two tensors ``[B, n]``, this rank's values of each sample, ``[B, k]`` sums in float32.
        difference: of these, summed over the ranks, ``[B]`` differences.
        source: who published it.
    """

    name: str
    sums: Callable[[Tensor, Tensor], Tensor]
    difference: Callable[[Tensor], Tensor]
    source: str


def _relative_sums(now: Tensor, before: Tensor) -> Tensor:
    changed = (now - before).abs().sum(dim=-1, dtype=torch.float32)
    return torch.stack([changed, before.abs().sum(dim=-1, dtype=torch.float32)], dim=-1)


def _ratio(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


# mean|now - last computed| / mean|last computed|.
FIRST_BLOCK = Rule(
    "first_block",
    _relative_sums,
    _ratio,
    source="ParaAttention, First Block Cache (github.com/chengzeyi/ParaAttention)",
)

RULES = {rule.name: rule for rule in (FIRST_BLOCK,)}


def rule_of(rule: str | Rule) -> Rule:
    """A rule by its name, or itself.

    Raises:
        ValueError, TypeError: there is no such rule.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rule is {rule!r}; expected a name, or a Rule of para_core.cache.rules.")
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(map(repr, RULES))}, or a Rule.")
    return RULES[rule]
