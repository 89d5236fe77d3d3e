"""The exchange of tokens before and after one call of flex attention over a mesh.

:func:`enter` returns the heads that Ulysses assigns to this rank, for the queries of its Ulysses group and
for the keys and values of the whole sequence, which are gathered over the ring. Queries and keys are in the
order of the sequence, so ``score_mod`` and ``mask_mod`` get the indices that they were written for, up to an
offset. :func:`leave` sends outputs back to the ranks that hold the tokens.

Both functions call differentiable operators, in eager code and in graphs. Like those of
:mod:`para_core.attention.operator`, the operators take the specification of the call as JSON.

:mod:`para_core.modes.flex_attention` calls this module, and :mod:`para_core.modes.block_masks` asks it which
queries a rank gets. Tests: tests/modes/test_flex_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan, cached_plan, read_plan
from para_core.attention.local import lay_out_like_sdpa
from para_core.distributed.collectives import define_collective, done
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.gather import gather, gather_gradient
from para_core.layout.pieces import Layout
from para_core.layout.sequence import Run, SequenceLayout


def enter(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange ``[B, H, S_local, D]`` for this rank's heads of its Ulysses group's queries and of all keys
    and values.

    The results are ``[B, H_local, S_group, D]`` and twice ``[B, H_kv_local, S, D]``, in the order of the
    sequence.

    Collective, as is the backward, unless the mesh of ``plan`` is this rank alone
    (``SequenceMesh.single_rank``). The gradients of replicated tokens are those of this rank's copy: their
    sum over the ranks is left to whoever has made the copies, like that of weights.
    """
    query, key, value, _ = torch.ops.para_core.flex_enter(
        query, key, value, plan.spec.text, plan.spec.numbers
    )
    return query, key, value


def leave(out: Tensor, plan: AttentionPlan) -> Tensor:
    """Return all heads of the outputs of this rank's tokens, ``[B, H, S_local, D]``: the inverse of
    :func:`enter`. ``out`` is ``[B, H_local, S_group, D]``, the outputs of the queries that :func:`enter`
    returned, in their order.

    Collective under the same condition, as is the backward, which sums the gradients of replicated tokens
    over the ranks that computed their heads.
    """
    local, _ = torch.ops.para_core.flex_leave(out, plan.spec.text, plan.spec.numbers)
    return local  # type: ignore[no-any-return]


def query_rows(layout: SequenceLayout, mesh: SequenceMesh) -> list[Run]:
    """Return the positions of the queries that :func:`enter` returns, as ascending runs ``(start, length)``.

    There is one run if the group holds the whole sequence; otherwise one per segment, or two per segment that
    is balanced for a causal mask. Lengths may be symbolic, so they are not compared.
    """
    # Compare with layout.ranks, not with 1: a rank that computes without the others
    # (``SequenceMesh.single_rank``) has a mesh of one rank, but holds only one of ``layout.ranks`` parts.
    if mesh.ulysses.size == layout.ranks or not layout.sharded:
        return [(0, layout.total)]
    width = mesh.ulysses.size
    ranks = range(mesh.ring.index * width, (mesh.ring.index + 1) * width)
    return Layout.of(layout, ranks).group_ranks(width).runs()


# The functions below implement the operators. ``*call`` stands for the spec as text, its numbers, and the
# argument ``after`` that every operator of define_collective has. A function and its ``_shape`` return tensors of
# equal shapes and strides; test_results_have_the_traced_shapes compares them.
#
# Each returns clones, because the result of a custom operator must not be a view of its input, which it would be if
# nothing is exchanged.
#
# All use ``ordered_ulysses`` and not ``ulysses``, because the user's functions get indices of the sequence.
# The Ulysses exchange comes first. After it, a rank holds for its heads what its group holds, and
# ``spec.keys`` is the layout of these parts on the ranks of the ring. So the exchange over the ring comes
# second, and first in the backward.


def _plan_of(text: str, numbers: list[int], *_: Any) -> AttentionPlan:
    """Return the plan of an operator's call. The scale is the business of the user's flex attention."""
    return cached_plan(text, tuple(numbers), None)


def _enter(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, ...]:
    plan = _plan_of(*call)
    if plan.ordered_ulysses is not None:
        query, key, value = plan.ordered_ulysses.enter((query, key, value))
    if plan.ring.rotates:
        key, value = (gather(x, 2, plan.spec.keys, plan.ring.dim) for x in (key, value))
    return *[x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)], done(query)


def _enter_shape(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, ...]:
    plan = read_plan(call[0], call[1], None)
    index = plan.spec.mesh.ulysses.index
    rows = sum([length for _, length in query_rows(plan.spec.query_layout, plan.spec.mesh)])
    of_query, of_key = plan.heads.query_runs[index][1], plan.heads.key_runs[index][1]
    total = plan.spec.key_layout.total
    return (
        query.new_empty(query.shape[0], of_query, rows, query.shape[3]),
        key.new_empty(key.shape[0], of_key, total, key.shape[3]),
        value.new_empty(value.shape[0], of_key, total, value.shape[3]),
        done(query),
    )


def _enter_backward(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs of :func:`_enter`. The tensors are the gradients of its outputs."""
    plan = _plan_of(*call)
    if plan.ring.rotates:
        key, value = (gather_gradient(x, 2, plan.spec.keys, plan.ring.dim) for x in (key, value))
    if plan.ordered_ulysses is not None:
        query, key, value = plan.ordered_ulysses.leave_gradients(
            *[x.contiguous() for x in (query, key, value)]
        )
    return *[x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)], done(query)


def _enter_backward_shape(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> tuple[Tensor, ...]:
    plan = read_plan(call[0], call[1], None)
    layouts = plan.spec.query_layout, plan.spec.key_layout, plan.spec.key_layout
    heads = plan.spec.num_heads, plan.spec.num_kv_heads, plan.spec.num_kv_heads
    grads = [
        x.new_empty(x.shape[0], number, layout.size(plan.spec.mesh.rank), x.shape[3])
        for x, number, layout in zip((query, key, value), heads, layouts, strict=True)
    ]
    return *grads, done(query)


def _leave(out: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    plan = _plan_of(*call)
    local = out
    if plan.ordered_ulysses is not None:
        local = plan.ordered_ulysses.leave((out,))[0]
    return lay_out_like_sdpa(local).clone(memory_format=torch.preserve_format), done(out)


def _leave_shape(out: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    plan = read_plan(call[0], call[1], None)
    local = out.new_empty(
        out.shape[0], plan.spec.query_layout.size(plan.spec.mesh.rank), plan.spec.num_heads, out.shape[3]
    )
    return local.transpose(1, 2), done(out)


def _leave_backward(grad: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    plan = _plan_of(*call)
    if plan.ordered_ulysses is not None:
        grad = plan.ordered_ulysses.enter_gradient(grad)
    return grad.clone(memory_format=torch.contiguous_format), done(grad)


def _leave_backward_shape(grad: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    plan = read_plan(call[0], call[1], None)
    rows = sum([length for _, length in query_rows(plan.spec.query_layout, plan.spec.mesh)])
    heads = plan.heads.query_runs[plan.spec.mesh.ulysses.index][1]
    return grad.new_empty(grad.shape[0], heads, rows, grad.shape[3]), done(grad)


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the spec of the call for the backward: the text, which is the only string among ``inputs``, and numbers."""
    ctx.call = next((text, inputs[i + 1]) for i, text in enumerate(inputs) if isinstance(text, str))


def _enter_gradient(ctx: Any, query: Tensor, key: Tensor, value: Tensor, _: Any) -> tuple[Any, ...]:
    *grads, _ = torch.ops.para_core.flex_enter_backward(query, key, value, *ctx.call)
    return (*grads, None, None, None)


def _leave_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    rows, _ = torch.ops.para_core.flex_leave_backward(grad, *ctx.call)
    return rows, None, None, None


_CALL = "str call, SymInt[] numbers, Tensor? after=None"
_THREE = "Tensor query, Tensor key, Tensor value"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
define_collective(
    f"flex_enter({_THREE}, {_CALL}) -> {_FOUR}", _enter, _enter_shape, _enter_gradient, _keep_call
)
define_collective(
    f"flex_enter_backward({_THREE}, {_CALL}) -> {_FOUR}", _enter_backward, _enter_backward_shape
)
define_collective(
    f"flex_leave(Tensor out, {_CALL}) -> (Tensor, Tensor)", _leave, _leave_shape, _leave_gradient, _keep_call
)
define_collective(
    f"flex_leave_backward(Tensor grad, {_CALL}) -> (Tensor, Tensor)", _leave_backward, _leave_backward_shape
)
