"""Attention calls as one device makes them, how ranks split them, and the comparison of both."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import make_qkv, relative_error
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh

# Each mesh is (ring, ulysses).
MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
CAUSAL = {"is_causal": True}
GQA = {"enable_gqa": True}

TEXT_FIRST = (("text", 5, True), ("image", 11, False))
IMAGE_FIRST = (("image", 11, False), ("text", 5, True))
BALANCED = (("video", 13, False, True),)


@dataclass(frozen=True)
class Mask:
    """A mask, and whether a rank gets all ``rows`` and ``columns`` or its part. Dims of size 1 are broadcast."""

    dims: str = "bhqk"  # These dims are not of size 1. Without b and h the mask has two dims.
    dtype: torch.dtype = torch.bool
    rows: str = "global"
    columns: str = "global"
    share: float = 0.3  # This share of the entries hides a key. With 1, all of them do.
    low: tuple[float, ...] = (float("-inf"),)  # In a float mask one of these numbers hides a key.

    def make(self, B: int, H: int, S: int, S_k: int) -> Tensor:
        sizes = [size if dim in self.dims else 1 for dim, size in zip("bhqk", (B, H, S, S_k), strict=True)]
        generator = torch.Generator().manual_seed(5)
        hidden = torch.rand(sizes, generator=generator) < self.share
        if "q" in self.dims and S > 1:
            hidden[:, :, 1] = True  # This query sees no key.
        if self.dtype == torch.bool:
            mask = ~hidden
        else:
            low = torch.tensor(self.low)[torch.randint(len(self.low), sizes, generator=generator)]
            mask = torch.where(hidden, low, torch.randn(sizes, generator=generator)).to(self.dtype)
        return mask if set(self.dims) & {"b", "h"} else mask[0, 0]

    def local_dims(self, query_layout: SequenceLayout, key_layout: SequenceLayout) -> list[tuple[int, SequenceLayout]]:
        """Return the dims of which a rank gets its part, and more than one token, because size 1 would broadcast."""
        candidates = [(-2, "q", self.rows, query_layout), (-1, "k", self.columns, key_layout)]
        return [
            (dim, layout)
            for dim, name, extent, layout in candidates
            if extent == "local" and name in self.dims and set(layout.sizes()) != {1}
        ]

    def cut(self, mask, cp, query_layout, key_layout):
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
    # Tuples of name, total, replicated, balanced. S and S_k are then sums. Keys are sharded like queries by default.
    segments: tuple[tuple[Any, ...], ...] | None = None
    key_segments: tuple[tuple[Any, ...], ...] | None = None
    mask: Mask | None = None
    options: dict[str, Any] = field(default_factory=dict)
    # lay_out describes the memory layouts.
    memory: str = "contiguous"
    autocast: bool = False
    # The mode, and the bool mask of the keys that it leaves.
    mode: Callable[..., UnifiedAttnMode] = UnifiedAttnMode
    visible: Tensor | None = None

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
        return self.attention(q, k, v, mask)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return SDPA of whole tensors. Its math backend accepts no mask with is_causal."""
        visible, options = self.visible, dict(self.options)
        if options.get("is_causal") and (mask is not None or visible is not None):
            causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
            visible = causal if visible is None else visible & causal
            options["is_causal"] = False
        if visible is not None and mask is not None:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))
        if mask is not None and mask.dtype == torch.float64:
            q, mask = _without_low_numbers(q, mask)
        with self.autocasting():
            return F.scaled_dot_product_attention(q, k, v, visible if mask is None else mask, **options)

    def autocasting(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def weight(self, rank: int) -> Tensor:
        """Return the weights of the output in the loss of ``rank``, for the whole sequence."""
        S, D_v = self.qkv()[0].shape[-2], self.qkv()[2].shape[-1]
        return make_qkv(S, self.H, D_v, B=self.B, seed=100 + rank)[0]


# A call of each kind, in which modes that approximate are compared.
FEW_CALLS = [
    Case(13, 4),
    Case(3, 1),
    Case(13, 6, H_kv=2, options=GQA),
    Case(H=3, segments=TEXT_FIRST),
    Case(H=4, segments=IMAGE_FIRST),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("text", 5, True),)),
    Case(13, 3, mask=Mask("bk")),
    Case(13, 2, B=0),
    Case(0, 2),
]


def _without_low_numbers(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and a mask with which float64 ignores the scores next to large numbers, as float32 does."""
    highest = mask.amax(-1, keepdim=True)
    is_low = (highest < -(2.0**24)) & (highest > float("-inf"))
    return torch.where(is_low, 0.0, q), torch.where(is_low, mask - highest, mask)


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


def own_attention(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
    """Attend by the formula, which gives NaN for a row that sees no key."""
    assert 0 not in query.shape and dropout_p == 0.0 and (attn_mask is None or not is_causal)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def compiled_sdpa(compile_with: str | None) -> Any:
    """Return a new function in each call, because functions with the same code would share compiled graphs."""

    def sdpa(*args: Any, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **options)

    if compile_with is None:
        return sdpa
    torch.compiler.reset()
    return torch.compile(sdpa, fullgraph=True, backend=compile_with)


def attend(cases, ring, ulysses, learns, compile_with, options):
    """Return the whole result of each case, and if it learns, this rank's gradients of a loss of its own."""
    mesh, results = cpu_mesh(ring, ulysses), []
    for case in cases:
        heartbeat()
        layouts = case.layouts(ring * ulysses)
        own_keys = None if layouts[1] is layouts[0] else layouts[1]
        mode = case.mode(mesh, layout=layouts[0], key_layout=own_keys, **options)
        with torch.set_grad_enabled(learns), mode as cp, case.autocasting():
            of_qkv = (*layouts, layouts[1])
            parts = [cp.shard(x, dim=-2, sequence=layout) for x, layout in zip(case.qkv(), of_qkv, strict=True)]
            if case.mask is not None:
                parts.append(case.mask.cut(case.whole_mask(), cp, *layouts))
            for x in parts:
                x.requires_grad_(learns and x.is_floating_point())
            out = compiled_sdpa(compile_with)(*parts, **case.options)
            whole = cp.gather(out.detach(), dim=-2, sequence=layouts[0])
        if learns:
            (out * held(case.weight(mesh.get_rank()), -2, layouts[0], mesh.get_rank())).sum().backward()
        results.append((whole, _grads(parts)))
    return results


def _grads(inputs: list[Tensor]) -> list[Tensor]:
    # torch gives no gradient to the mask of empty attention.
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad]


def check_all(rank_pool, cases, ring, ulysses, *, learns=False, compile_with=None, run=attend, **options):
    """Raise if the result of a case, or a gradient if it learns, differs from one device on any rank."""
    results = rank_pool.run(run, ring * ulysses, cases, ring, ulysses, learns, compile_with, options)
    for case, *of_ranks in zip(cases, *results, strict=True):
        where = f"{case} on ring {ring} × ulysses {ulysses}"
        for out, _ in of_ranks:
            _check_out(case, out, where)
        if learns:
            _check_gradients(case, [grads for _, grads in of_ranks], where)


def _check_out(case: Case, out: Tensor, where: str) -> None:
    expected = case.on_one_device()
    assert out.dtype == expected.dtype, where
    if out.dtype in (torch.float32, torch.float64):
        assert relative_error(out, expected) < (1e-5 if out.dtype == torch.float32 else 1e-12), where
        return
    # In 16 bits the result must be as exact as SDPA's own, which on few numbers may be exact by chance.
    exact = case.on_one_device(double=True)
    bound = 2 * relative_error(expected, exact) + torch.finfo(out.dtype).eps / 4
    assert relative_error(out, exact) <= bound, where


def _check_gradients(case: Case, of_ranks: list[list[Tensor]], where: str) -> None:
    whole, expected = _put_gradients_together(case, of_ranks), _gradients_on_one_device(case, len(of_ranks))
    # If softmax is constant (one key, or the same bias for all keys), gradients are rounding errors of 0.
    scale = expected[2].norm()
    assert len(whole) == len(expected), where
    for name, gradient, reference in zip(("query", "key", "value", "mask"), whole, expected, strict=False):
        assert gradient.shape == reference.shape, where
        error = (gradient - reference).norm() / max(scale, reference.norm())
        assert error <= 1e-5 or not (gradient - reference).any(), f"{name} of {where}: {error}"


def _gradients_on_one_device(case: Case, ranks: int) -> list[Tensor]:
    """Return the gradients of the sum of all ranks' losses."""
    layout, _ = case.layouts(ranks)
    weights = [held(case.weight(rank), -2, layout, rank) for rank in range(ranks)]
    inputs = [*(x.clone() for x in case.qkv()), *([] if case.mask is None else [case.whole_mask()])]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    (case.attention(*inputs) * put_together(weights, -2, layout)).sum().backward()
    return _grads(inputs)


def _put_gradients_together(case: Case, of_ranks: list[list[Tensor]]) -> list[Tensor]:
    layouts = case.layouts(len(of_ranks))
    q, k, v, *masks = zip(*of_ranks, strict=True)
    whole = [put_together(list(q), -2, layouts[0]), *(put_together(list(x), -2, layouts[1]) for x in (k, v))]
    for parts in masks:
        local = case.mask.local_dims(*layouts)
        whole.append(put_together(list(parts), *local[0]) if local else torch.stack(parts).sum(0))
    return whole
