"""Attention over the mesh as one operation: of autograd in eager code, of the graph under ``torch.compile``.

In a graph it is one opaque operator per call, and one for its gradient. So the compiler neither drops nor reorders the
collectives inside, a ring of any size is one node, lengths are plain integers when it runs, and a rank without tokens or
heads takes part like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.approximate.block_mask import decode
from para_core.attention.approximate.kept_keys import KeptKeys
from para_core.attention.local import lse_dtype
from para_core.attention.tiling import RotateMethod
from para_core.attention.unified import Block, UnifiedCall
from para_core.collectives import wait
from para_core.layout import Segment, SequenceLayout
from para_core.mesh import MeshDim, SequenceMesh


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: UnifiedCall) -> Tensor:
    """:meth:`UnifiedCall.forward`, differentiable."""
    given = (query, key, value) if mask is None else (query, key, value, mask)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if torch.compiler.is_compiling():
        # Waiting for the result is a side effect: it keeps the operator in the graph of a rank for which it has no
        # elements, and which the others wait for.
        return wait(torch.ops.para_core.attention(query, key, value, mask, keep, *_encode(call))[0])
    if keep:
        out: Tensor = _Attention.apply(query, key, value, mask, call)[0]  # type: ignore[no-untyped-call]
        return out
    return call.forward(query, key, value, mask)[0]


# -- what is kept for the gradient: lse and a block's query, key, value and out; without an exchange, the block's tensors
# -- are the inputs and the output.


def _kept(block: Block, call: UnifiedCall) -> tuple[Tensor, ...]:
    if call.exchange is None:
        return (block.lse, *[block.lse.new_empty(0) for _ in range(4)])
    return (block.lse, block.query, block.key, block.value, block.out)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor], call: UnifiedCall) -> None:
    out, lse, *block = output
    ctx.mark_non_differentiable(lse, *block)
    ctx.set_materialize_grads(False)
    # The marker: activation checkpointing that recomputes outside of the mode, by SDPA, saves other tensors than these,
    # which torch then finds out and says.
    marker = lse.new_empty(call.mesh.ranks, 0)
    ctx.save_for_backward(inputs[3], marker, *([*inputs[:3], out] if call.exchange is None else block), lse)


class _Attention(torch.autograd.Function):
    """In eager code, where one sees the collectives inside."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: UnifiedCall) -> Any:
        out, block = call.forward(query, key, value, mask, keep=True)
        return (out, *_kept(block, call))  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[4]
        _save(ctx, inputs, output, ctx.call)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
        mask, _, *block = ctx.saved_tensors
        *grads, grad_mask = ctx.call.backward(grad_out, Block(*block), mask, mask_gradient=ctx.needs_input_grad[3])
        return (*grads, None if grad_mask is None else grad_mask.to(mask.dtype), None)


# -- the operator: a call is written as what a schema can hold


_SEPARATOR = "\n"  # in no group's name
_KINDS = ((False, False), (True, False), (False, True))  # replicated, balanced


def _encode(call: UnifiedCall) -> tuple[Any, ...]:
    query_layout, key_layout, mesh = call.ring.query_layout, call.ring.key_layout, call.mesh
    return (
        [segment.total for segment in query_layout.segments],
        [_KINDS.index((segment.replicated, segment.balanced)) for segment in query_layout.segments],
        # Nothing: keys are cut like queries.
        [] if key_layout is query_layout else [segment.total for segment in key_layout.segments],
        [_KINDS.index((segment.replicated, segment.balanced)) for segment in key_layout.segments],
        query_layout.ranks,
        [mesh.ring.size, mesh.ring.index, mesh.ulysses.size, mesh.ulysses.index],
        mesh.ring.group_name + _SEPARATOR + mesh.ulysses.group_name,
        [call.heads.num_heads, call.heads.num_kv_heads],
        call.ring.is_causal,
        call.ring.scale,
        call.ulysses_chunks,
        "" if call.ring.blocks is None else call.ring.blocks.encode(),
        1.0 if call.kept is None else call.kept.share,
        0 if call.kept is None else call.kept.window,
        call.comm_dtype,
        call.ring.rotate_method,
    )


def _decode(
    query_totals: Sequence[int],
    query_kinds: Sequence[int],
    key_totals: Sequence[int],
    key_kinds: Sequence[int],
    ranks: int,
    mesh: Sequence[int],
    groups: str,
    heads: Sequence[int],
    is_causal: bool,
    scale: float | None,
    ulysses_chunks: int,
    block_mask: str,
    share: float,
    window: int,
    comm_dtype: torch.dtype | None,
    rotate_method: RotateMethod,
) -> UnifiedCall:
    query_layout = _layout(query_totals, query_kinds, ranks)
    key_layout = _layout(key_totals, key_kinds, ranks) if key_totals else query_layout
    ring_group, ulysses_group = groups.split(_SEPARATOR)
    dims = (
        MeshDim("ring", mesh[0], mesh[1], ring_group, None),
        MeshDim("ulysses", mesh[2], mesh[3], ulysses_group, None),
    )
    return UnifiedCall(
        query_layout,
        key_layout,
        SequenceMesh(*dims, device_type=""),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        is_causal=is_causal,
        scale=scale,
        ulysses_chunks=ulysses_chunks,
        block_mask=decode(block_mask),
        kept=KeptKeys(share, window) if window else None,
        comm_dtype=comm_dtype,
        rotate_method=rotate_method,
    )


def _layout(totals: Sequence[int], kinds: Sequence[int], ranks: int) -> SequenceLayout:
    pairs = zip(totals, kinds, strict=True)
    return SequenceLayout(tuple([Segment("", total, *_KINDS[kind]) for total, kind in pairs]), ranks)


# What _encode gives, as a schema names it.
_CALL_SCHEMA = (
    "SymInt[] query_totals, int[] query_kinds, SymInt[] key_totals, int[] key_kinds, int ranks, int[] mesh, str groups, "
    "SymInt[] heads, bool is_causal, float? scale, int ulysses_chunks, str block_mask, float share, "
    "int window, ScalarType? comm_dtype, str rotate_method"
)


@torch.library.custom_op(
    "para_core::attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, bool keep, {_CALL_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: bool,
    *encoded: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _decode(*encoded)
    out, block = call.forward(query, key, value, mask, keep=keep)
    # One memory format whatever computed it, the one that models go on with: the graph was traced for it.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if block is None:
        return out, *[out.new_empty(0) for _ in range(5)]  # type: ignore[return-value]
    return out, *[x.clone(memory_format=torch.contiguous_format) for x in _kept(block, call)]  # type: ignore[return-value]


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: bool, *encoded: Any) -> tuple[Tensor, ...]:
    call = _decode(*encoded)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    if not keep:
        return out, *[out.new_empty(0) for _ in range(5)]
    if call.exchange is None:
        lse = query.new_empty(query.shape[:3], dtype=lse_dtype(query))
        return out, lse, *[lse.new_empty(0) for _ in range(4)]
    batch, index = query.shape[0], call.mesh.ulysses.index
    num_heads, num_kv_heads = call.heads.of_query()[index][1], call.heads.of_key()[index][1]
    num_queries = call.exchange.block_size(call.ring.query_layout)
    num_keys = call.exchange.block_size(call.ring.key_layout)
    return (
        out,
        query.new_empty(batch, num_heads, num_queries, dtype=lse_dtype(query)),
        query.new_empty(batch, num_heads, num_queries, query.shape[3]),
        query.new_empty(batch, num_kv_heads, num_keys, key.shape[3]),
        query.new_empty(batch, num_kv_heads, num_keys, value.shape[3]),
        query.new_empty(batch, num_heads, num_queries, value.shape[3]),
    )


@torch.library.custom_op(
    "para_core::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? mask, Tensor[] block, bool mask_gradient, {_CALL_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad_out: Tensor,
    mask: Tensor | None,
    block: list[Tensor],
    mask_gradient: bool,
    *encoded: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _decode(*encoded)
    *grads, grad_mask = call.backward(grad_out, Block(*block), mask, mask_gradient=mask_gradient)
    grad_mask = grad_out.new_empty(0) if grad_mask is None or mask is None else grad_mask.to(mask.dtype)
    grads = [x.clone(memory_format=torch.contiguous_format) for x in grads]
    return grads[0], grads[1], grads[2], grad_mask


@_attention_backward.register_fake
def _(
    grad_out: Tensor, mask: Tensor | None, block: list[Tensor], mask_gradient: bool, *encoded: Any
) -> tuple[Tensor, ...]:
    call = _decode(*encoded)
    rank, query, key, value = call.mesh.rank, *block[:3]
    num_queries, num_keys = call.ring.query_layout.size(rank), call.ring.key_layout.size(rank)
    return (
        query.new_empty(query.shape[0], call.heads.num_heads, num_queries, query.shape[3]),
        key.new_empty(key.shape[0], call.heads.num_kv_heads, num_keys, key.shape[3]),
        value.new_empty(value.shape[0], call.heads.num_kv_heads, num_keys, value.shape[3]),
        mask.new_empty(mask.shape) if mask is not None and mask_gradient else grad_out.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.encoded = inputs[5:]
    _save(ctx, inputs, output, _decode(*ctx.encoded))


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    mask, _, *block = ctx.saved_tensors
    mask_gradient = ctx.needs_input_grad[3]
    grads = torch.ops.para_core.attention_backward(grad_out, mask, block, mask_gradient, *ctx.encoded)
    done = [wait(grad) for grad in grads]
    return (*done[:3], done[3] if mask_gradient else None, None, *[None for _ in ctx.encoded])


_attention.register_autograd(_backward, setup_context=_setup_context)
