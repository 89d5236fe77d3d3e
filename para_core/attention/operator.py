"""Attention over the mesh as one operation: of autograd in eager code, of the graph under ``torch.compile``.

In a graph it is one opaque operator per call, and one for its gradient. So the compiler neither drops nor reorders the
collectives inside, a ring of any size is one node, lengths are plain integers when it runs, and a rank without tokens or
heads takes part like any other. What is computed is one constant, the text of a call (``Call.as_text``), and the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.call import Call, known_call, read_call
from para_core.attention.local import lse_dtype
from para_core.attention.usp import Saved, backward, forward
from para_core.distributed.collectives import define_collective, done


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call) -> Tensor:
    """:func:`~para_core.attention.usp.forward`, differentiable."""
    save = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)
    )
    if torch.compiler.is_compiling():
        operator = torch.ops.para_core.attention_to_learn if save else torch.ops.para_core.attention
        found: Tensor = operator(query, key, value, mask, call.as_text(), call.numbers, call.scale)[0]
        return found
    if save:
        out: Tensor = _Attention.apply(query, key, value, mask, call)[0]  # type: ignore[no-untyped-call]
        return out
    with torch.no_grad():
        return forward(call, query, key, value, mask)[0]


# -- what is saved for the gradient: lse and a block's query, key, value and out; without an exchange, the block's tensors
# -- are the inputs and the output.


def _outputs(saved: Saved, call: Call) -> tuple[Tensor, ...]:
    if call.exchange is None:
        return (saved.lse, *[saved.lse.new_empty(0) for _ in range(4)])
    return (saved.lse, saved.query, saved.key, saved.value, saved.out)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor], call: Call) -> None:
    out, lse, *block = output[:6]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # The marker: activation checkpointing that recomputes outside of the mode, by SDPA, saves other tensors than these,
    # which torch then finds out and says.
    marker = lse.new_empty(call.mesh.ranks, 0)
    ctx.save_for_backward(inputs[3], marker, *([*inputs[:3], out] if call.exchange is None else block), lse)


def _followed_outside(tensors: Sequence[Any]) -> bool:
    """Whether autograd outside of a transform of torch.func follows any of its inputs."""
    functorch = torch._C._functorch
    inside = [x for x in tensors if isinstance(x, Tensor) and functorch.is_gradtrackingtensor(x)]
    return any(functorch.get_unwrapped(x).requires_grad for x in inside)


def _refuse_second_derivative(followed_outside: bool, grad_out: Tensor) -> None:
    """Raise where this gradient would itself be differentiated: it is computed by operators that autograd does not follow."""
    if not torch.is_grad_enabled():
        return
    # torch.func.grad always keeps a graph; only if something outside of it asks for one is a gradient lost.
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is None or innermost.level() > 1 or followed_outside or _followed_outside([grad_out]):
        raise RuntimeError(
            "attention over several ranks has no second derivative, and its gradient was asked for with create_graph=True (or by "
            "nested torch.func transforms). Leave create_graph out, or compute this attention on one rank under "
            "UnifiedAttnMode.disable()."
        )


class _Attention(torch.autograd.Function):
    """In eager code, where one sees the collectives inside."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call) -> Any:
        out, saved = forward(call, query, key, value, mask, save=True)
        return (out, *_outputs(saved, call))  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[4]
        ctx.followed_outside = _followed_outside(inputs)
        _save(ctx, inputs, output, ctx.call)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
        mask, _, *saved = ctx.saved_tensors
        _refuse_second_derivative(ctx.followed_outside, grad_out)
        with torch.no_grad():
            *grads, grad_mask = backward(ctx.call, grad_out, Saved(*saved), mask, mask_gradient=ctx.needs_input_grad[3])
        return (*grads, None if grad_mask is None else grad_mask.to(mask.dtype), None)


# -- the operator


# What read_call takes, and define_collective: ``*call`` below.
_CALL = "str call, SymInt[] numbers, float? scale, Tensor? after=None"
_INPUTS = f"Tensor query, Tensor key, Tensor value, Tensor? mask, {_CALL}"


def _known(text: str, numbers: list[int], scale: float | None, *_: Any) -> Call:
    return known_call(text, tuple(numbers), scale)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *call: Any) -> tuple[Tensor, Tensor]:
    out, _ = forward(_known(*call), query, key, value, mask)
    return out, done(out)


def _attention_shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)


def _attention_to_learn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, ...]:
    known = _known(*call)
    out, saved = forward(known, query, key, value, mask, save=True)
    return out, *_as_traced(_outputs(saved, known)), done(out)  # type: ignore[arg-type]


def _as_traced(found: Sequence[Tensor]) -> list[Tensor]:
    """Copies: a block that came without one is a view of what came."""
    return [x.clone(memory_format=torch.contiguous_format) for x in found]


def _attention_to_learn_shape(
    query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    call = read_call(*rest[:3])
    out, token = _attention_shape(query, key, value)
    if call.exchange is None:
        lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query))
        return out, lse, *[lse.new_empty(0) for _ in range(4)], token
    batch, index = query.shape[0], call.mesh.ulysses.index
    of_query = batch, call.heads.of_query[index][1], call.exchange.block_size(call.query_layout)
    of_key = batch, call.heads.of_key[index][1], call.exchange.block_size(call.key_layout)
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
        *grads, grad_mask = backward(_known(*call), grad_out, Saved(*saved), mask, mask_gradient=mask_gradient)
    grad_mask = grad_out.new_empty(0) if grad_mask is None or mask is None else grad_mask.to(mask.dtype)
    return *_as_traced(grads), grad_mask, done(grad_out)


def _attention_backward_shape(
    grad_out: Tensor, mask: Tensor | None, saved: list[Tensor], mask_gradient: bool, *rest: Any
) -> tuple[Tensor, ...]:
    call = read_call(*rest[:3])
    of_query = call.num_heads, call.query_layout.size(call.mesh.rank)
    of_key = call.num_kv_heads, call.key_layout.size(call.mesh.rank)
    grads = [x.new_empty(x.shape[0], *of, x.shape[3]) for x, of in zip(saved, (of_query, of_key, of_key), strict=False)]
    grad_mask = mask.new_empty(mask.shape) if mask is not None and mask_gradient else grad_out.new_empty(0)
    return *grads, grad_mask, done(grad_out)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.call = inputs[4:7]
    _save(ctx, inputs, output, read_call(*ctx.call))


def _gradient(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    mask, _, *saved = ctx.saved_tensors
    mask_gradient = ctx.needs_input_grad[3]
    *grads, grad_mask, _ = torch.ops.para_core.attention_backward(grad_out, mask, saved, mask_gradient, *ctx.call)
    return (*grads, grad_mask if mask_gradient else None, *[None for _ in range(4)])


define_collective(f"attention({_INPUTS}) -> (Tensor, Tensor)", _attention, _attention_shape)
define_collective(
    f"attention_to_learn({_INPUTS}) -> ({', '.join(['Tensor'] * 7)})",
    _attention_to_learn,
    _attention_to_learn_shape,
    _gradient,
    _context,
)
define_collective(
    f"attention_backward(Tensor grad_out, Tensor? mask, Tensor[] saved, bool mask_gradient, {_CALL})"
    f" -> ({', '.join(['Tensor'] * 5)})",
    _attention_backward,
    _attention_backward_shape,
)
