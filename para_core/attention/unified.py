"""Ulysses inside, ring outside: SDPA over a sequence that is sharded over a ``ring × ulysses`` mesh, and its gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from para_core.attention.approximate.block_mask import BlockMask
from para_core.attention.approximate.kept_keys import KeptKeys, hide, select_keys, sparse_attention
from para_core.attention.causal import join_neighbours
from para_core.attention.local import local_attention, local_attention_with_lse
from para_core.attention.ring import (
    AttendWithLse,
    columns,
    expand,
    ring_attention,
    ring_attention_backward,
)
from para_core.attention.tiling import RingCall, RotateMethod
from para_core.attention.ulysses import Exchange, Heads
from para_core.layout import SequenceLayout
from para_core.mesh import MeshDim, SequenceMesh


@dataclass(frozen=True)
class Block:
    """What a gradient needs of an attention call: a ring block's tensors ``[B, H_local, S_block, …]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class UnifiedCall:
    """One attention call over the mesh, tensors aside.

    Args:
        key_layout: ``query_layout`` itself, not an equal one, where keys are cut like queries: they then travel in one
            table.
        num_heads, num_kv_heads: of all ranks; the latter divides the former.
        block_mask: which blocks are computed; all if None.
        kept: how it is decided which keys are; all if None.
        comm_dtype: of what travels where no gradient is kept; None: as it is.
        rotate_method: how blocks travel forward.
    """

    def __init__(
        self,
        query_layout: SequenceLayout,
        key_layout: SequenceLayout,
        mesh: SequenceMesh,
        *,
        num_heads: int,
        num_kv_heads: int,
        is_causal: bool,
        scale: float | None,
        ulysses_chunks: int = 1,
        block_mask: BlockMask | None = None,
        kept: KeptKeys | None = None,
        comm_dtype: torch.dtype | None = None,
        rotate_method: RotateMethod = "alltoall",
    ) -> None:
        if not key_layout.sharded and kept is None:
            # Every rank holds all keys: nothing has to move, each is a block of its own. (Votes come from all queries.)
            mesh = alone(mesh)
        self.mesh = mesh
        self.heads = Heads(num_heads, num_kv_heads, mesh.ulysses.size)
        self.ring = RingCall(query_layout, key_layout, mesh, is_causal, scale, block_mask, rotate_method=rotate_method)
        self.comm_dtype = comm_dtype
        self.kept = kept
        self.ulysses_chunks = ulysses_chunks
        # Without other Ulysses ranks a block is what a rank holds, as it holds it.
        self.exchange = Exchange(query_layout, key_layout, mesh, self.heads) if mesh.ulysses.size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        attend: AttendWithLse = local_attention_with_lse,
        keep: bool = False,
    ) -> tuple[Tensor, Block | None]:
        """This rank's queries attend to all keys of the sequence.

        Args:
            query: ``[B, H, S_q_local, D]``, as the query layout says.
            key, value: ``[B, H_kv, S_k_local, D]``, ``[B, H_kv, S_k_local, D_v]``, as the key layout says.
            mask: as :func:`~para_core.attention.mask.mask_of_block` gives it.
            keep: return what :meth:`backward` needs.

        Returns:
            ``[B, H, S_q_local, D_v]``.
        """
        # Autocast would round scores, votes and lse that are float32 on purpose.
        with torch.autocast(query.device.type, enabled=False):
            call = self._compressed() if self.comm_dtype is not None and not keep else self
            return call._forward(query, key, value, mask, attend, keep)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attend: AttendWithLse,
        keep: bool,
    ) -> tuple[Tensor, Block | None]:
        if self.exchange is None:
            out, lse = self._of_block(query, key, value, mask, self.heads, attend, keep)
            return out, None if lse is None else Block(query, key, value, out, lse)
        if self.ulysses_chunks > 1 and not keep:
            return self._in_chunks(self.exchange, query, key, value, mask, attend), None
        query, key, value = self.exchange.start_enter(query, key, value)()
        out, lse = self._of_block(query, key, value, mask, self.heads, attend, keep)
        return self.exchange.start_leave(out)(), None if lse is None else Block(query, key, value, out, lse)

    def _compressed(self) -> UnifiedCall:
        """This call, with what travels in ``comm_dtype``."""
        call = copy.copy(self)
        call.comm_dtype = None
        call.ring = replace(self.ring, comm_dtype=self.comm_dtype)
        call.exchange = None if self.exchange is None else replace(self.exchange, comm_dtype=self.comm_dtype)
        return call

    def _of_block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        heads: Heads,
        attend: AttendWithLse,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a block's queries; its lse where that is to be kept."""
        key_heads = heads.key_of_each_query(self.mesh.ulysses.index, query.device)
        if not keep and attend is local_attention_with_lse and self._is_local():
            key, value = expand(key, key_heads), expand(value, key_heads)
            ring = self.ring
            mask = None if mask is None else columns(mask, ring.key_runs(0))
            return local_attention(query, key, value, mask=mask, is_causal=ring.is_causal, scale=ring.scale), None
        if self.kept is not None:
            out, lse = sparse_attention(
                query, key, value, mask, self.ring, self.kept, heads=key_heads, attend=attend, keep=keep
            )
        else:
            out, lse = ring_attention(query, key, value, mask, self.ring, heads=key_heads, attend=attend)
        return out, lse if keep else None

    def _in_chunks(
        self,
        exchange: Exchange,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attend: AttendWithLse,
    ) -> Tensor:
        """A part of the heads after the other: the next part arrives, and the one before leaves, while one is computed."""
        index = self.mesh.ulysses.index
        first_head = self.heads.of_query()[index][0]
        chunks = [replace(exchange, heads=heads) for heads in self.heads.cut(self.ulysses_chunks)]
        entering = chunks[0].start_enter(query, key, value)
        leaving = []
        for place, chunk in enumerate(chunks):
            block = entering()
            if place + 1 < len(chunks):
                entering = chunks[place + 1].start_enter(query, key, value)
            start, count = chunk.heads.of_query()[index]
            rows = mask if mask is None or mask.shape[1] == 1 else mask.narrow(1, start - first_head, count)
            out, _ = self._of_block(block[0], block[1], block[2], rows, chunk.heads, attend, keep=False)
            leaving.append(chunk.start_leave(out))
        parts = [
            finish().split([count for _, count in chunk.heads.of_query()], dim=1)
            for chunk, finish in zip(chunks, leaving, strict=True)
        ]
        return torch.cat([part[rank] for rank in range(self.mesh.ulysses.size) for part in parts], dim=1)

    def _is_local(self) -> bool:
        """Whether SDPA itself computes a block: all keys are here, and in the order of the queries if that matters."""
        if self.ring.blocks is not None or self.kept is not None:
            return False
        if not self.ring.is_causal or self.mesh.ring.size > 1:
            return self.mesh.ring.size == 1
        queries, keys = join_neighbours(self.ring.query_runs()), join_neighbours(self.ring.key_runs(0))
        return queries == keys and len(queries) <= 1

    def backward(
        self, grad_out: Tensor, block: Block, mask: Tensor | None, *, mask_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of query, key and value, and of ``mask`` if asked for, of the sum of all ranks' losses."""
        with torch.autocast(grad_out.device.type, enabled=False):
            return self._backward(grad_out, block, mask, mask_gradient)

    def _backward(
        self, grad_out: Tensor, block: Block, mask: Tensor | None, mask_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if self.exchange is not None:
            grad_out = self.exchange.enter_gradient(grad_out)
        heads = self.heads.key_of_each_query(self.mesh.ulysses.index, grad_out.device)
        hidden = mask
        if self.kept is not None:
            hidden = hide(mask, select_keys(block.query, block.key, mask, self.ring, self.kept, heads=heads))
        *grads, grad_mask = ring_attention_backward(
            grad_out,
            block.query,
            block.key,
            block.value,
            hidden,
            block.out,
            block.lse,
            self.ring,
            heads=heads,
            mask_gradient=mask_gradient,
        )
        if grad_mask is not None and mask is not None:
            grad_mask = grad_mask.sum_to_size(mask.shape)
        if self.exchange is not None:
            grads = self.exchange.leave_gradients(*grads)
        return grads[0], grads[1], grads[2], grad_mask


def alone(mesh: SequenceMesh) -> SequenceMesh:
    """The mesh of a rank that computes what it needs from what it holds; it keeps its place in the sequence."""
    return SequenceMesh(MeshDim("ring", 1, mesh.rank, "", None), MeshDim("ulysses", 1, 0, "", None), mesh.device_type)
