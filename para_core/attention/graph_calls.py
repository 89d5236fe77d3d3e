"""The arguments that the operators of attention and of its gradient have in common, and the shape of the output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan, cached_plan
from para_core.distributed.collectives import done

# The schemas of the arguments that operators take as ``*call``: the arguments of read_plan, and ``after``,
# which define_collective adds.
CALL = "str call, SymInt[] numbers, float? scale, Tensor? after=None"
OPERATOR_INPUTS = f"Tensor query, Tensor key, Tensor value, Tensor? mask, {CALL}"


def plan_of(text: str, numbers: list[int], scale: float | None, *_: Any) -> AttentionPlan:
    """Return the plan of an operator's call."""
    return cached_plan(text, tuple(numbers), scale)


def attention_shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    """Return an uninitialised output of attention, and the token of the operator: its kernel for fake tensors."""
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)
