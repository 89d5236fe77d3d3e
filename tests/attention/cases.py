"""Attention calls as one device makes them, and how ranks split them. Tests of exactness and of gradients draw from
these.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import make_qkv
from tests.rank_pool import heartbeat

# Each mesh is (ring, ulysses).
MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
# Only the long run has meshes of four ranks, because three ranks give several hops and uneven parts as well.
ON_MOST_MESHES = [pytest.param(*mesh, marks=pytest.mark.long if 4 in mesh else ()) for mesh in MESHES]
# For tests that cross meshes with another axis: a ring, Ulysses with parts that do not divide, and both.
ON_FEW_MESHES = [
    pytest.param(*mesh, marks=() if mesh in [(2, 1), (1, 3), (2, 2)] else pytest.mark.long) for mesh in MESHES
]
on_most_meshes = pytest.mark.parametrize(("ring", "ulysses"), ON_MOST_MESHES)
on_few_meshes = pytest.mark.parametrize(("ring", "ulysses"), ON_FEW_MESHES)
CAUSAL = {"is_causal": True}
GQA = {"enable_gqa": True}

TEXT_FIRST = (("text", 5, True), ("image", 11, False))
IMAGE_FIRST = (("image", 11, False), ("text", 5, True))
BALANCED = (("video", 13, False, True),)


@dataclass(frozen=True)
class Mask:
    """A mask, and for ``rows`` and ``columns`` whether a rank gets all of them or its part. Dims of size 1 are
    broadcast.
    """

    dims: str = "bhqk"  # These dims are not of size 1. Without b and h the mask has two dims.
    dtype: torch.dtype = torch.bool
    rows: str = "global"
    columns: str = "global"
    share: float = 0.3  # This share of the entries hides a key. With 1, all of them do.

    def make(self, B: int, H: int, S: int, S_k: int) -> Tensor:
        sizes = [size if dim in self.dims else 1 for dim, size in zip("bhqk", (B, H, S, S_k), strict=True)]
        generator = torch.Generator().manual_seed(5)
        hidden = torch.rand(sizes, generator=generator) < self.share
        if "q" in self.dims and S > 1:
            hidden[:, :, 1] = True  # This query sees no key.
        if self.dtype == torch.bool:
            mask = ~hidden
        else:
            mask = torch.randn(sizes, generator=generator).to(self.dtype).masked_fill(hidden, float("-inf"))
        return mask if set(self.dims) & {"b", "h"} else mask[0, 0]

    def local_dims(self, query_layout: SequenceLayout, key_layout: SequenceLayout) -> list[tuple[int, SequenceLayout]]:
        """Return the dims of which a rank gets its part. A dim in which each rank has one token is omitted, because
        size 1 would broadcast.
        """
        candidates = [(-2, "q", self.rows, query_layout), (-1, "k", self.columns, key_layout)]
        return [
            (dim, layout)
            for dim, name, extent, layout in candidates
            if extent == "local" and name in self.dims and set(layout.sizes()) != {1}
        ]

    def cut(
        self, mask: Tensor, cp: UnifiedAttnMode, query_layout: SequenceLayout, key_layout: SequenceLayout
    ) -> Tensor:
        mask = mask.clone()
        for dim, layout in self.local_dims(query_layout, key_layout):
            mask = cp.shard(mask, dim=dim, sequence=layout)
        return mask


@dataclass(frozen=True)
class Case:
    """An attention call, and how its tokens are sharded."""

    S: int = 13
    H: int = 3
    D: int = 8
    B: int = 2
    S_k: int | None = None
    H_kv: int | None = None
    D_v: int | None = None
    dtype: torch.dtype = torch.float32
    # Each tuple has name, total, replicated and balanced. S and S_k are then sums of totals. Keys are sharded like
    # queries unless key_segments is given.
    segments: tuple[tuple[Any, ...], ...] | None = None
    key_segments: tuple[tuple[Any, ...], ...] | None = None
    mask: Mask | None = None
    options: dict[str, Any] = field(default_factory=dict)
    # lay_out describes the memory layouts.
    memory: str = "contiguous"

    def qkv(self) -> list[Tensor]:
        S = self.S if self.segments is None else _total(self.segments)
        S_k = self.S_k if self.key_segments is None else _total(self.key_segments)
        qkv = make_qkv(S, self.H, self.D, B=self.B, S_k=S_k, H_kv=self.H_kv, D_v=self.D_v, dtype=self.dtype)
        return [lay_out(x, self.memory) for x in qkv]

    def whole_mask(self) -> Tensor | None:
        q, k, _ = self.qkv()
        return None if self.mask is None else self.mask.make(self.B, self.H, q.shape[-2], k.shape[-2])

    def layouts(self, ranks: int) -> tuple[SequenceLayout, SequenceLayout]:
        q, k, _ = self.qkv()
        query_layout = _layout(self.segments, q.shape[-2], ranks)
        if self.key_segments is None and q.shape[-2] == k.shape[-2]:
            return query_layout, query_layout
        return query_layout, _layout(self.key_segments, k.shape[-2], ranks)

    def on_one_device(self, *, double: bool = False) -> Tensor:
        q, k, v = (x.double() if double else x for x in self.qkv())
        if self.H == 0:
            # SDPA of torch 2.11 divides by the number of heads on a CPU, which would end the process.
            return q.new_empty(*q.shape[:-1], v.shape[-1])
        mask = self.whole_mask()
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        return sdpa_with_both(q, k, v, mask, **self.options)

    def weight(self, rank: int | None = None) -> Tensor:
        """Return the weights of the output in the loss of ``rank``, for the whole sequence."""
        S, D_v = self.qkv()[0].shape[-2], self.qkv()[2].shape[-1]
        return make_qkv(S, self.H, D_v, B=self.B, seed=7 if rank is None else 100 + rank)[0]


def _total(segments: tuple[tuple[Any, ...], ...]) -> int:
    return sum(segment[1] for segment in segments)


def _layout(segments: tuple[tuple[Any, ...], ...] | None, total: int, ranks: int) -> SequenceLayout:
    return SequenceLayout(tuple(Segment(*segment) for segment in segments or (("sequence", total),)), ranks)


def lay_out(x: Tensor, memory: str) -> Tensor:
    if memory == "transposed":  # A model passes [B, S, H, D] with heads and tokens swapped.
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "strided":
        return torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]
    if memory == "expanded":  # One head of one sample is repeated in all others.
        return x[:1, :1].expand_as(x)
    if memory == "3-D":
        return x[0]
    if memory == "5-D":
        return x.unflatten(0, (1, -1))
    return x


def held(x: Tensor, dim: int, layout: SequenceLayout, rank: int) -> Tensor:
    """Return the part of ``x`` that ``rank`` holds, from positions written out."""
    positions = [start + i for start, length in layout.runs(rank) for i in range(length)]
    return x.index_select(dim, torch.tensor(positions, dtype=torch.long))


def put_together(parts: list[Tensor], dim: int, layout: SequenceLayout) -> Tensor:
    """Return the sum of the parts of all ranks, each at its positions. Replicated tokens are added."""
    shape = list(parts[0].shape)
    shape[dim] = layout.total
    whole = parts[0].new_zeros(shape)
    for rank, part in enumerate(parts):
        positions = [start + i for start, length in layout.runs(rank) for i in range(length)]
        whole.index_add_(dim, torch.tensor(positions, dtype=torch.long), part)
    return whole


def compiled_sdpa(compile_with: str | None) -> Any:
    """Return a new function in each call, because functions with the same code would share compiled graphs."""

    def sdpa(*args: Any, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **options)

    if compile_with is None:
        return sdpa
    torch.compiler.reset()
    return torch.compile(sdpa, fullgraph=True, backend=compile_with)


def attend(
    cases: list[Case],
    ring: int,
    ulysses: int,
    compile_with: str | None = None,
    mode_options: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Return the whole result of each case, gathered on this rank."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    outs = []
    with torch.no_grad():
        for case in cases:
            heartbeat()
            query_layout, key_layout = case.layouts(ring * ulysses)
            q, k, v = case.qkv()
            mask = case.whole_mask()
            whole_layouts = query_layout, key_layout
            key_layout = None if key_layout is query_layout else key_layout
            options = {"layout": query_layout, "key_layout": key_layout, **(mode_options or {})}
            with UnifiedAttnMode(mesh, **options) as cp:
                if mask is not None:
                    mask = case.mask.cut(mask, cp, *whole_layouts)
                q = cp.shard(q, dim=-2, sequence=query_layout)
                k, v = (cp.shard(x, dim=-2, sequence=key_layout or query_layout) for x in (k, v))
                sdpa = compiled_sdpa(compile_with)
                out = sdpa(q, k, v, mask, **case.options)
                outs.append(cp.gather(out, dim=-2, sequence=query_layout))
    return outs


def gradients(
    cases: list[Case],
    ring: int,
    ulysses: int,
    compile_with: str | None = None,
    mode_options: dict[str, Any] | None = None,
) -> list[list[Tensor]]:
    """Return, for each case, this rank's gradients of query, key, value and a float mask. Each rank has its own
    loss.
    """
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    rank, results = mesh.get_rank(), []
    for case in cases:
        heartbeat()
        query_layout, key_layout = case.layouts(ring * ulysses)
        q, k, v = case.qkv()
        weight = held(case.weight(rank), -2, query_layout, rank)
        inputs = [held(x, -2, layout, rank) for x, layout in ((q, query_layout), (k, key_layout), (v, key_layout))]
        mask, whole_layouts = case.whole_mask(), (query_layout, key_layout)
        key_layout = None if key_layout is query_layout else key_layout
        sdpa = compiled_sdpa(compile_with)
        with UnifiedAttnMode(mesh, layout=query_layout, key_layout=key_layout, **(mode_options or {})) as cp:
            if mask is not None:
                inputs.append(case.mask.cut(mask, cp, *whole_layouts))
            for x in inputs:
                x.requires_grad_(x.is_floating_point())
            out = sdpa(*inputs, **case.options)
        (out * weight).sum().backward()
        results.append(_grads(inputs))
    return results


def gradients_on_one_device(case: Case, ranks: int) -> list[Tensor]:
    """Return the gradients of the sum of all ranks' losses, including that of a float mask."""
    query_layout, _ = case.layouts(ranks)
    weights = [held(case.weight(rank), -2, query_layout, rank) for rank in range(ranks)]
    weight = put_together(weights, -2, query_layout)
    inputs = [x.clone() for x in case.qkv()]
    mask = case.whole_mask()
    if mask is not None:
        inputs.append(mask.clone())
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    out = sdpa_with_both(*inputs, **case.options)
    (out * weight).sum().backward()
    return _grads(inputs)


def _grads(inputs: list[Tensor]) -> list[Tensor]:
    # torch gives no gradient to the mask of empty attention.
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad]


def sdpa_with_both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Call SDPA with a mask and is_causal, which its math backend does not accept together."""
    if mask is not None and options.get("is_causal"):
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
        options = {**options, "is_causal": False}
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def put_gradients_together(case: Case, parts_of_ranks: list[list[Tensor]]) -> list[Tensor]:
    query_layout, key_layout = case.layouts(len(parts_of_ranks))
    q, k, v, *masks = zip(*parts_of_ranks, strict=True)
    whole = [put_together(list(q), -2, query_layout), *(put_together(list(x), -2, key_layout) for x in (k, v))]
    for parts in masks:
        local = case.mask.local_dims(query_layout, key_layout)
        whole.append(put_together(list(parts), *local[0]) if local else torch.stack(parts).sum(0))
    return whole
