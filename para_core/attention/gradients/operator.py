"""Attention over the mesh as one differentiable operation: an autograd function in eager code, operators in a
graph.

Both save the same tensors (:func:`_save`) and have the same backward. Every rank must run the backward,
because it is collective.

:func:`~para_core.attention.operator.differentiable_usp` calls :func:`differentiate`, which it finds by its
line in :mod:`para_core.attention.features`. The backward itself is :mod:`.usp` of this folder. Tests:
tests/attention/test_gradients.py, and tests/attention/test_exactness.py for graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.attend import Saved
from para_core.attention.attention_plan import AttentionPlan, read_plan
from para_core.attention.gradients.usp import check_gradient, usp_backward
from para_core.attention.graph_calls import CALL, OPERATOR_INPUTS, attention_shape, plan_of
from para_core.attention.local import lse_dtype
from para_core.attention.usp import usp_forward
from para_core.distributed.collectives import define_collective, done
from para_core.torch_internals import innermost_transform, is_grad_tracking_tensor, unwrap_transform_tensor


def differentiate(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the output of a call that requires a gradient, differentiable.

    Raises:
        RuntimeError: The gradient of the ring style of the call was removed.
    """
    check_gradient(plan.style.gradient)
    if torch.compiler.is_compiling():
        operator = torch.ops.para_core.attention_to_learn
        out: Tensor = operator(query, key, value, mask, plan.spec.text, plan.spec.numbers, plan.spec.scale)[0]
        return out
    out = _EagerAttention.apply(query, key, value, mask, plan)[0]  # type: ignore[no-untyped-call]
    return out


# The next two functions choose what the backward needs: lse, and query, key, value and out after the Ulysses
# exchange. Without an exchange these four are the inputs and the output of the call, so they are not returned
# again.


def _outputs(saved: Saved | None, plan: AttentionPlan) -> tuple[Tensor, ...]:
    """Return lse, and the block of query, key, value and out: empty tensors if these are the inputs and the output."""
    if saved is None:
        raise RuntimeError("the forward of a call that requires a gradient saved nothing.")
    if plan.ulysses is None:
        new_empty = saved.lse.new_empty
        return saved.lse, new_empty(0), new_empty(0), new_empty(0), new_empty(0)
    return saved.lse, saved.query, saved.key, saved.value, saved.out


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor], plan: AttentionPlan) -> None:
    """Save for the backward what :class:`Saved` holds, from the inputs and outputs of an operator or function.

    The saved tensors are the mask, a marker that is not read, and the fields of :class:`Saved` in their
    order. :func:`_begin_backward` reads what else is set.
    """
    query, key, value, mask, *_ = inputs
    out, lse, block_query, block_key, block_value, block_out, *_ = output
    ctx.followed_outside = _is_followed_outside(inputs)
    ctx.out_shape = out.shape
    ctx.mark_non_differentiable(*output[1:])
    # Otherwise torch would make zeros for the gradient of each output, also of these.
    ctx.set_materialize_grads(False)
    # If activation checkpointing recomputes this call outside the mode, by SDPA, the marker makes torch raise
    # an error, because the saved tensors then differ in shape.
    marker = lse.new_empty(plan.spec.mesh.ranks, 0)
    if plan.ulysses is None:
        ctx.save_for_backward(mask, marker, query, key, value, out, lse)
    else:
        ctx.save_for_backward(mask, marker, block_query, block_key, block_value, block_out, lse)


def _is_followed_outside(tensors: Sequence[Any]) -> bool:
    """Whether any of ``tensors`` requires a gradient outside the innermost torch.func transform that is running."""
    inside = [x for x in tensors if isinstance(x, Tensor) and is_grad_tracking_tensor(x)]
    return any(unwrap_transform_tensor(x).requires_grad for x in inside)


def _begin_backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return the gradient of the output, the mask and the fields of :class:`Saved`.

    The gradient is None if a function that used the output returned no gradient. It is then zeros, because
    other ranks may have one, and the backward is collective.

    Raises:
        RuntimeError: This gradient would itself be differentiated.
    """
    mask, _, *saved = ctx.saved_tensors
    _check_no_second_derivative(ctx.followed_outside, grad_out)
    if grad_out is None:
        grad_out = saved[0].new_zeros(ctx.out_shape)
    return grad_out, mask, saved


def _check_no_second_derivative(followed_outside: bool, grad_out: Tensor | None) -> None:
    """Raise ``RuntimeError`` if this gradient would itself be differentiated, which would silently be wrong,
    because autograd does not record the operators that compute it.

    ``followed_outside`` says whether an input requires a gradient outside the torch.func transform of the
    forward.
    """
    if not torch.is_grad_enabled():
        return
    # Do not raise for a plain torch.func.grad. It always builds a graph of the gradient, but this graph is
    # used only if there is another transform around torch.func.grad, or if an input requires a gradient.
    innermost = innermost_transform()
    if innermost is None or innermost.level() > 1 or followed_outside or _is_followed_outside([grad_out]):
        raise RuntimeError(
            "attention over several ranks has no second derivative, and its gradient was asked for with "
            "create_graph=True (or by nested torch.func transforms). Leave create_graph out, or compute this "
            "attention on one rank under UnifiedAttnMode.disable()."
        )


class _EagerAttention(torch.autograd.Function):
    """The autograd function of attention over the mesh in eager code. Graphs use the operators below instead."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, plan: AttentionPlan) -> Any:
        out, saved = usp_forward(plan, query, key, value, mask, save=True)
        return (out, *_outputs(saved, plan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan = inputs[4]
        _save(ctx, inputs, output, ctx.plan)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> Any:
        grad_out, mask, saved = _begin_backward(ctx, grad_out)
        with torch.no_grad():
            *grads, grad_mask = usp_backward(
                ctx.plan, grad_out, Saved(*saved), mask, mask_gradient=ctx.needs_input_grad[3]
            )
        if grad_mask is not None and mask is not None:
            grad_mask = grad_mask.to(mask.dtype)
        return (*grads, grad_mask, None)


def _attention_to_learn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, ...]:
    plan = plan_of(*call)
    out, saved = usp_forward(plan, query, key, value, mask, save=True)
    return out, *_as_traced(_outputs(saved, plan)), done(out)


def _as_traced(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of ``tensors``, because the result of an operator must not be a view of its input."""
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _attention_to_learn_shape(
    query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    plan = read_plan(*rest[:3])
    out, token = attention_shape(query, key, value)
    if plan.ulysses is None:
        lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query))
        return out, lse, lse.new_empty(0), lse.new_empty(0), lse.new_empty(0), lse.new_empty(0), token
    batch, index = query.shape[0], plan.spec.mesh.ulysses.index
    of_query = batch, plan.heads.query_runs[index][1], plan.ulysses.queries.size
    of_key = batch, plan.heads.key_runs[index][1], plan.ulysses.keys.size
    return (
        out,
        query.new_empty(of_query, dtype=lse_dtype(query)),
        query.new_empty(*of_query, query.shape[3]),
        query.new_empty(*of_key, key.shape[3]),
        query.new_empty(*of_key, value.shape[3]),
        query.new_empty(*of_query, value.shape[3]),
        token,
    )


def _attention_backward(
    grad_out: Tensor, mask: Tensor | None, saved: list[Tensor], mask_gradient: bool, *call: Any
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        *grads, grad_mask = usp_backward(
            plan_of(*call), grad_out, Saved(*saved), mask, mask_gradient=mask_gradient
        )
    if grad_mask is None or mask is None:
        grad_mask = grad_out.new_empty(0)
    else:
        # It lies in memory as the mask does, which may be permuted.
        grad_mask = grad_mask.to(mask.dtype).contiguous()
    return *_as_traced(grads), grad_mask, done(grad_out)


def _attention_backward_shape(
    grad_out: Tensor, mask: Tensor | None, saved: list[Tensor], mask_gradient: bool, *rest: Any
) -> tuple[Tensor, ...]:
    plan = read_plan(*rest[:3])
    spec = plan.spec
    of_query = spec.num_heads, spec.query_layout.size(spec.mesh.rank)
    of_key = spec.num_kv_heads, spec.key_layout.size(spec.mesh.rank)
    grads = [
        x.new_empty(x.shape[0], *of, x.shape[3])
        for x, of in zip(saved[:3], (of_query, of_key, of_key), strict=True)
    ]
    if mask is not None and mask_gradient:
        grad_mask = mask.new_empty(mask.shape)
    else:
        grad_mask = grad_out.new_empty(0)
    return *grads, grad_mask, done(grad_out)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, _, text, numbers, scale, *_ = inputs
    ctx.call = (text, numbers, scale)
    _save(ctx, inputs, output, read_plan(text, numbers, scale))


def _gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grad_out, mask, saved = _begin_backward(ctx, grad_out)
    mask_gradient = ctx.needs_input_grad[3]
    *grads, grad_mask, _ = torch.ops.para_core.attention_backward(
        grad_out, mask, saved, mask_gradient, *ctx.call
    )
    if not mask_gradient:
        grad_mask = None
    # The text, the numbers, the scale and the token of the call have no gradient.
    return (*grads, grad_mask, None, None, None, None)


define_collective(
    f"attention_to_learn({OPERATOR_INPUTS}) -> ({', '.join(['Tensor'] * 7)})",
    _attention_to_learn,
    _attention_to_learn_shape,
    _gradient,
    _context,
)
define_collective(
    f"attention_backward(Tensor grad_out, Tensor? mask, Tensor[] saved, bool mask_gradient, {CALL})"
    f" -> ({', '.join(['Tensor'] * 5)})",
    _attention_backward,
    _attention_backward_shape,
)
