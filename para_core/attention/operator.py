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
from para_core.attention.unified import Saved, backward, forward
from para_core.collectives import LIBRARY, done, done_waiting, in_program_order


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call) -> Tensor:
    """:func:`~para_core.attention.unified.forward`, differentiable."""
    save = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)
    )
    if torch.compiler.is_compiling():
        found = torch.ops.para_core.attention(
            query, key, value, mask, save, call.as_text(), *call.totals, call.num_heads, call.num_kv_heads, call.scale
        )
        return done_waiting(found[0])
    if save:
        out: Tensor = _Attention.apply(query, key, value, mask, call)[0]  # type: ignore[no-untyped-call]
        return out
    if not torch.is_grad_enabled():
        return forward(call, query, key, value, mask)[0]
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

# What read_call takes.
_CALL = "str call, SymInt[] query_totals, SymInt[] key_totals, SymInt num_heads, SymInt num_kv_heads, float? scale"

LIBRARY.define(
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool save, {_CALL}, Tensor? after=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_backward(Tensor grad_out, Tensor? mask, Tensor[] saved, bool mask_gradient, {_CALL}, Tensor? after=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _call_of(text: str, query_totals: Sequence[int], key_totals: Sequence[int], *rest: Any) -> Call:
    return known_call(text, tuple(query_totals), tuple(key_totals), *rest)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, save: bool, *rest: Any
) -> tuple[Tensor, ...]:
    call = _call_of(*rest[:6])
    with torch.no_grad():
        out, saved = forward(call, query, key, value, mask, save=save)
    token = done(out)
    if saved is None:
        return out, *[token.new_empty(0) for _ in range(5)], token
    # As they were traced: a block that came without a copy is a view of what came.
    return out, *[x.clone(memory_format=torch.contiguous_format) for x in _outputs(saved, call)], token


def _attention_meta(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, save: bool, *rest: Any
) -> tuple[Tensor, ...]:
    call = read_call(*rest[:6])
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    token = done(out)
    if not save:
        return out, *[token.new_empty(0) for _ in range(5)], token
    if call.exchange is None:
        lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query))
        return out, lse, *[lse.new_empty(0) for _ in range(4)], token
    batch, index = query.shape[0], call.mesh.ulysses.index
    num_heads, num_kv_heads = call.heads.of_query[index][1], call.heads.of_key[index][1]
    num_queries = call.exchange.block_size(call.query_layout)
    num_keys = call.exchange.block_size(call.key_layout)
    return (
        out,
        query.new_empty(batch, num_heads, num_queries, dtype=lse_dtype(query)),
        query.new_empty(batch, num_heads, num_queries, query.shape[3]),
        query.new_empty(batch, num_kv_heads, num_keys, key.shape[3]),
        query.new_empty(batch, num_kv_heads, num_keys, value.shape[3]),
        query.new_empty(batch, num_heads, num_queries, value.shape[3]),
        token,
    )


def _attention_backward(
    grad_out: Tensor, mask: Tensor | None, saved: list[Tensor], mask_gradient: bool, *rest: Any
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        *grads, grad_mask = backward(_call_of(*rest[:6]), grad_out, Saved(*saved), mask, mask_gradient=mask_gradient)
    grad_mask = grad_out.new_empty(0) if grad_mask is None or mask is None else grad_mask.to(mask.dtype)
    return *[x.clone(memory_format=torch.contiguous_format) for x in grads], grad_mask, done(grad_out)


def _attention_backward_meta(
    grad_out: Tensor, mask: Tensor | None, saved: list[Tensor], mask_gradient: bool, *rest: Any
) -> tuple[Tensor, ...]:
    call = read_call(*rest[:6])
    rank, query, key, value = call.mesh.rank, *saved[:3]
    num_queries, num_keys = call.query_layout.size(rank), call.key_layout.size(rank)
    return (
        query.new_empty(query.shape[0], call.num_heads, num_queries, query.shape[3]),
        key.new_empty(key.shape[0], call.num_kv_heads, num_keys, key.shape[3]),
        value.new_empty(value.shape[0], call.num_kv_heads, num_keys, value.shape[3]),
        mask.new_empty(mask.shape) if mask is not None and mask_gradient else grad_out.new_empty(0),
        done(grad_out),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.call = inputs[5:11]
    _save(ctx, inputs, output, read_call(*ctx.call))


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    mask, _, *saved = ctx.saved_tensors
    mask_gradient = ctx.needs_input_grad[3]
    *grads, _ = torch.ops.para_core.attention_backward(grad_out, mask, saved, mask_gradient, *ctx.call)
    grads = [done_waiting(grad) for grad in grads]
    return (*grads[:3], grads[3] if mask_gradient else None, *[None for _ in range(8)])


LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("para_core::attention", _attention_meta, lib=LIBRARY)
torch.library.register_fake("para_core::attention_backward", _attention_backward_meta, lib=LIBRARY)
torch.library.register_autograd("para_core::attention", _backward, setup_context=_setup_context, lib=LIBRARY)
in_program_order("attention", 11)
in_program_order("attention_backward", 10)
