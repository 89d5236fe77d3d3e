"""Token exchange around one call of flex attention: each rank gets some heads of its Ulysses group's queries and of all
keys.

:func:`enter` gives a rank the heads that Ulysses assigns to it. Its queries are those of its Ulysses group; its keys
and values are those of the whole sequence, gathered over the ring. Both are in the order of the sequence, so
``score_mod`` and ``mask_mod`` get the indices that they were written for, up to an offset. :func:`leave` returns
outputs to the ranks that hold the tokens.

Both are operators with a gradient, in eager code and in graphs. They take a call as JSON, like
:mod:`para_core.attention.operator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan, cached_plan, read_plan
from para_core.attention.local import as_sdpa
from para_core.attention.tiles import own_runs, sharded_runs
from para_core.attention.ulysses import num_replicated
from para_core.distributed.collectives import all_gather, all_to_all, define_collective, done
from para_core.distributed.layout import Run, SequenceLayout
from para_core.distributed.mesh import SequenceMesh


def enter(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of the queries of its Ulysses group, and of all keys and values, each in the order of
    the sequence.

    Args:
        query, key, value: ``[B, H, S_local, D]``, in the layouts of ``plan``.
    """
    query, key, value, _ = torch.ops.para_core.flex_enter(query, key, value, plan.spec.text, plan.spec.numbers)
    return query, key, value


def leave(out: Tensor, plan: AttentionPlan) -> Tensor:
    """Return all heads of this rank's tokens. ``out`` is ``[B, H_local, S, D]``, in the order of the queries from
    :func:`enter`.
    """
    own, _ = torch.ops.para_core.flex_leave(out, plan.spec.text, plan.spec.numbers)
    return own  # type: ignore[no-any-return]


def query_rows(layout: SequenceLayout, mesh: SequenceMesh) -> list[Run]:
    """Return the positions of the queries from :func:`enter`, ascending: one run per segment, or two if it is balanced.

    Lengths may be symbolic, so they are not compared.
    """
    # A rank that works alone (``SequenceMesh.alone``) has a mesh of one rank, but holds one of ``layout.ranks`` parts.
    if mesh.ulysses.size == layout.ranks or not layout.sharded:
        return [(0, layout.total)]
    first = mesh.ring.index * mesh.ulysses.size
    ranks = range(first, first + mesh.ulysses.size)
    rows, before = [], 0
    for segment in layout.segments:
        if segment.replicated:
            rows.append((before, segment.total))
        else:
            parts = [segment.runs(rank, layout.ranks) for rank in ranks]
            # The last rank holds the first of the back parts of a balanced segment.
            for index, first_rank in ((0, 0), (1, -1))[: 1 + segment.balanced]:
                start = parts[first_rank][index][0]
                rows.append((before + start, sum([part[index][1] for part in parts])))
        before = before + segment.total
    return rows


# -- reordering tokens between the order of a block and the order of the sequence


def _order(runs: Sequence[Run]) -> list[int] | None:
    """Return the indices that sort ``runs`` by position; None if they are sorted."""
    order = sorted(range(len(runs)), key=lambda i: runs[i])
    return None if order == list(range(len(runs))) else order


def _sorted(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return ``x``, ``[B, H, S, D]``, with its tokens in the order of the sequence; ``runs`` are their positions
    now.
    """
    order = _order(runs)
    if order is None:
        return x
    parts = x.split([length for _, length in runs], dim=2)
    return torch.cat([parts[i] for i in order], dim=2)


def _unsorted(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """Undo :func:`_sorted`."""
    order = _order(runs)
    if order is None:
        return x
    parts = x.split([runs[i][1] for i in order], dim=2)
    index_of = {i: index for index, i in enumerate(order)}
    return torch.cat([parts[index_of[i]] for i in range(len(runs))], dim=2)


def _key_runs(plan: AttentionPlan) -> list[Run]:
    """Return the positions of the keys as gathered over the ring: the block of each ring rank, then the replicated
    tokens.
    """
    layout, mesh = plan.spec.key_layout, plan.spec.mesh
    if not plan.ring.rotates:
        return own_runs(layout, mesh)
    travelling = [run for index in range(mesh.ring.size) for run in sharded_runs(layout, mesh, index)]
    return travelling + list(layout.runs(0, replicated=True))


def _travelling_first(x: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Return the sharded and the replicated tokens of a block of keys. Without other Ulysses ranks the block is in the
    order of its layout.
    """
    layout, mesh = plan.spec.key_layout, plan.spec.mesh
    if mesh.ulysses.size > 1:
        common = num_replicated(layout)
        return x.narrow(2, 0, x.shape[2] - common), x.narrow(2, x.shape[2] - common, common)
    parts = x.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=2)
    kinds = [
        [part for part, segment in zip(parts, layout.segments, strict=True) if segment.replicated == replicated]
        for replicated in (False, True)
    ]
    sharded, replicated = (torch.cat(kind, dim=2) if kind else x[:, :, :0] for kind in kinds)
    return sharded, replicated


def _back_in_layout(sharded: Tensor, replicated: Tensor, plan: AttentionPlan) -> Tensor:
    """Undo :func:`_travelling_first`."""
    layout, mesh = plan.spec.key_layout, plan.spec.mesh
    if mesh.ulysses.size > 1:
        return torch.cat([sharded, replicated], dim=2)
    starts, parts = [0, 0], []
    for segment in layout.segments:
        kind, length = int(segment.replicated), segment.size(mesh.rank, layout.ranks)
        parts.append((sharded, replicated)[kind].narrow(2, starts[kind], length))
        starts[kind] += length
    return torch.cat(parts, dim=2)


# -- implementation of the operators


def _enter(
    query: Tensor, key: Tensor, value: Tensor, text: str, numbers: list[int], after: Tensor | None = None
) -> tuple[Tensor, ...]:
    plan = cached_plan(text, tuple(numbers), None)
    if plan.ulysses is not None:
        query, key, value = plan.ulysses.enter.start((query, key, value))()
    query = _sorted(query, own_runs(plan.spec.query_layout, plan.spec.mesh))
    blocks = [_sorted(_gathered(x, plan), _key_runs(plan)) for x in (key, value)]
    # Copies, because the result of an operator must not be a view of its input.
    return *[x.clone(memory_format=torch.contiguous_format) for x in (query, *blocks)], done(query)


def _gathered(x: Tensor, plan: AttentionPlan) -> Tensor:
    if not plan.ring.rotates:
        return x
    sharded, replicated = _travelling_first(x, plan)
    return torch.cat([all_gather(sharded, plan.ring.block_sizes, 2, plan.spec.mesh.ring), replicated], dim=2)


def _enter_shape(
    query: Tensor, key: Tensor, value: Tensor, text: str, numbers: list[int], *_: Any
) -> tuple[Tensor, ...]:
    plan = read_plan(text, numbers, None)
    index = plan.spec.mesh.ulysses.index
    rows = sum([length for _, length in query_rows(plan.spec.query_layout, plan.spec.mesh)])
    of_query, of_key = plan.heads.of_query[index][1], plan.heads.of_key[index][1]
    total = plan.spec.key_layout.total
    return (
        query.new_empty(query.shape[0], of_query, rows, query.shape[3]),
        key.new_empty(key.shape[0], of_key, total, key.shape[3]),
        value.new_empty(value.shape[0], of_key, total, value.shape[3]),
        done(query),
    )


def _enter_backward(
    query: Tensor, key: Tensor, value: Tensor, text: str, numbers: list[int], after: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs of :func:`_enter`, from those of its outputs."""
    plan = cached_plan(text, tuple(numbers), None)
    query = _unsorted(query, own_runs(plan.spec.query_layout, plan.spec.mesh))
    key, value = (_scattered(_unsorted(x, _key_runs(plan)), plan) for x in (key, value))
    if plan.ulysses is not None:
        query, key, value = plan.ulysses.leave_gradients(*[x.contiguous() for x in (query, key, value)])
    return *[x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)], done(query)


def _scattered(grad: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the sum over all ring ranks of the gradients of this rank's keys: the transpose of :func:`_gathered`."""
    if not plan.ring.rotates:
        return grad
    sizes, ring = plan.ring.block_sizes, plan.spec.mesh.ring
    travelling, replicated = grad.split([sum(sizes), grad.shape[2] - sum(sizes)], dim=2)
    rows = all_to_all(travelling.movedim(2, 0).contiguous(), sizes, [sizes[ring.index]] * ring.size, ring)
    own = rows.unflatten(0, (ring.size, sizes[ring.index])).sum(0).movedim(0, 2)
    return _back_in_layout(own, replicated, plan)


def _enter_backward_shape(
    query: Tensor, key: Tensor, value: Tensor, text: str, numbers: list[int], *_: Any
) -> tuple[Tensor, ...]:
    plan = read_plan(text, numbers, None)
    layouts = plan.spec.query_layout, plan.spec.key_layout, plan.spec.key_layout
    heads = plan.spec.num_heads, plan.spec.num_kv_heads, plan.spec.num_kv_heads
    grads = [
        x.new_empty(x.shape[0], number, layout.size(plan.spec.mesh.rank), x.shape[3])
        for x, number, layout in zip((query, key, value), heads, layouts, strict=True)
    ]
    return *grads, done(query)


def _leave(out: Tensor, text: str, numbers: list[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    plan = cached_plan(text, tuple(numbers), None)
    out = _unsorted(out, own_runs(plan.spec.query_layout, plan.spec.mesh)).contiguous()
    own = out if plan.ulysses is None else plan.ulysses.leave.start((out,))()[0]
    return as_sdpa(own).clone(memory_format=torch.preserve_format), done(out)


def _leave_shape(out: Tensor, text: str, numbers: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    plan = read_plan(text, numbers, None)
    own = out.new_empty(
        out.shape[0], plan.spec.query_layout.size(plan.spec.mesh.rank), plan.spec.num_heads, out.shape[3]
    )
    return own.transpose(1, 2), done(out)


def _leave_backward(grad: Tensor, text: str, numbers: list[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    plan = cached_plan(text, tuple(numbers), None)
    if plan.ulysses is not None:
        grad = plan.ulysses.enter_gradient(grad)
    rows = _sorted(grad, own_runs(plan.spec.query_layout, plan.spec.mesh))
    return rows.clone(memory_format=torch.contiguous_format), done(grad)


def _leave_backward_shape(grad: Tensor, text: str, numbers: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    plan = read_plan(text, numbers, None)
    rows = sum([length for _, length in query_rows(plan.spec.query_layout, plan.spec.mesh)])
    heads = plan.heads.of_query[plan.spec.mesh.ulysses.index][1]
    return grad.new_empty(grad.shape[0], heads, rows, grad.shape[3]), done(grad)


# -- their gradients


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
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
define_collective(f"flex_enter({_THREE}, {_CALL}) -> {_FOUR}", _enter, _enter_shape, _enter_gradient, _keep_call)
define_collective(f"flex_enter_backward({_THREE}, {_CALL}) -> {_FOUR}", _enter_backward, _enter_backward_shape)
define_collective(
    f"flex_leave(Tensor out, {_CALL}) -> (Tensor, Tensor)", _leave, _leave_shape, _leave_gradient, _keep_call
)
define_collective(
    f"flex_leave_backward(Tensor grad, {_CALL}) -> (Tensor, Tensor)", _leave_backward, _leave_backward_shape
)
