"""Attention calls with random sizes, layouts, masks and options, and the error of a mesh relative to SDPA on one
device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.option_values import RotateMethod

FLOAT32_BOUND = 1e-5
_MASK_DIMS = ["qk", "k", "q", "bk", "bqk", "bhqk", "hqk", "hk", "h", ""]


@dataclass(frozen=True)
class DrawnMask:
    """A mask with dims ``dims`` that are not of size 1. It says which of the last two are parts of a rank."""

    dims: str
    dtype: torch.dtype
    local: str
    hidden: float  # This is the share of the entries that hide a key.

    def make(self, sizes: dict[str, int], generator: torch.Generator) -> Tensor:
        """Return the mask, ``[B or 1, H or 1, S_q or 1, S_k or 1]``."""
        shape = [size if dim in self.dims else 1 for dim, size in sizes.items()]
        hides = torch.rand(shape, generator=generator) < self.hidden
        if self.dtype == torch.bool:
            return ~hides
        return torch.randn(shape, generator=generator).to(self.dtype).masked_fill(hides, float("-inf"))


@dataclass(frozen=True)
class DrawnCall:
    """A call whose tensors follow from ``seed``. If ``key_segments`` is None, keys are sharded like queries."""

    seed: int
    query_segments: tuple[Segment, ...]
    key_segments: tuple[Segment, ...] | None
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    mask: DrawnMask | None
    is_causal: bool
    scale: float | None
    gradients: bool

    def layouts(self, ranks: int) -> tuple[SequenceLayout, SequenceLayout]:
        """Return the layouts of queries and keys, which are the same object if both are sharded in the same way."""
        queries = SequenceLayout(self.query_segments, ranks)
        return queries, queries if self.key_segments is None else SequenceLayout(self.key_segments, ranks)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return query, key and value of the whole sequence, and the mask if the call has one."""
        generator = torch.Generator().manual_seed(self.seed)
        S, S_k = (layout.total for layout in self.layouts(1))
        shapes = [(self.num_heads, S, self.head_dim), (self.num_kv_heads, S_k, self.head_dim)]
        shapes.append((self.num_kv_heads, S_k, self.value_dim))
        tensors = [torch.randn(self.batch, *shape, generator=generator).to(self.dtype) for shape in shapes]
        if self.mask is None:
            return tensors
        return [*tensors, self.mask.make({"b": self.batch, "h": self.num_heads, "q": S, "k": S_k}, generator)]

    def attend(self, tensors: list[Tensor], *, alone: bool = False) -> Tensor:
        """Return SDPA of the tensors. ``alone`` says that it runs on one device, whose math backend accepts no mask
        with is_causal.
        """
        query, key, value, mask = (*tensors, None)[:4]
        is_causal, grouped = self.is_causal, self.num_kv_heads < self.num_heads
        if alone and is_causal and mask is not None:
            causal, is_causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(), False
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=self.scale, enable_gqa=grouped
        )


def draw(seed: int) -> DrawnCall:
    """Return the call with this number, which is always the same."""
    dice = random.Random(seed)
    kv_heads, group = dice.randint(1, 4), dice.choice([1, 1, 2, 3])
    dtype = dice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    head_dim = dice.randint(1, 9)
    return DrawnCall(
        seed,
        _segments(dice),
        _segments(dice) if dice.random() < 0.3 else None,
        dice.randint(1, 2),
        kv_heads * group,
        kv_heads,
        head_dim,
        dice.choice([head_dim, head_dim, dice.randint(1, 9)]),
        dtype,
        None if dice.random() < 0.4 else _mask(dice),
        dice.random() < 0.4,
        dice.choice([None, 0.5]),
        dtype == torch.float32 and dice.random() < 0.5,
    )


def _segments(dice: random.Random) -> tuple[Segment, ...]:
    """Draw one to three segments of 1 to 31 tokens in total, because SDPA's result without any key depends on the
    backend.
    """
    kinds = [(False, False), (False, False), (True, False), (False, True)]
    segments = [
        Segment(str(index), dice.choice([0, 1, 3, dice.randint(2, 31)]), *dice.choice(kinds))
        for index in range(dice.randint(1, 3))
    ]
    return tuple(segments) if sum(segment.total for segment in segments) else (Segment("0", dice.randint(1, 31)),)


def _mask(dice: random.Random) -> DrawnMask:
    dtype = dice.choice([torch.bool, torch.float32])
    return DrawnMask(dice.choice(_MASK_DIMS), dtype, dice.choice(["", "q", "k"]), dice.choice([0.0, 0.3, 0.9, 1.0]))


# -- On ranks.


def worst_error(call: DrawnCall, mesh: DeviceMesh, rotate_method: RotateMethod) -> float:
    """Return the larger error of out and of gradients over all ranks, as a multiple of the allowed error.

    In float32 ‖out - expected‖ may be 1e-5 ‖expected‖. The error of a gradient may be at least 1e-5 of the norm of
    value's gradient. In 16 bits ‖out - exact‖ may be twice the error of SDPA against float64 plus one rounding, because
    partial results are rounded before they are merged, and SDPA may be exact by chance on a few numbers.
    """
    layouts = call.layouts(mesh.size())
    mode = UnifiedAttnMode(mesh, layout=layouts[0], key_layout=_other(layouts), rotate_method=rotate_method)
    with mode, torch.set_grad_enabled(call.gradients):
        parts = _parts(call, mesh, mode)
        out = call.attend(parts)
    positions = _positions(layouts[0], mesh.get_rank())
    errors = [_error_of_out(call, out.detach(), positions)]
    if call.gradients:
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1000 * call.seed + mesh.get_rank()))
        (out * weight).sum().backward()
        errors += _errors_of_gradients(call, parts, weight, mesh)
    return max(errors)


def _parts(call: DrawnCall, mesh: DeviceMesh, mode: UnifiedAttnMode) -> list[Tensor]:
    """Return this rank's parts of query, key, value and mask. They are leaves that require gradients if the call has
    gradients.
    """
    queries, keys = call.layouts(mesh.size())
    query, key, value, *masks = call.tensors
    parts = [_held(x, 2, layout, mesh) for x, layout in ((query, queries), (key, keys), (value, keys))]
    for mask in masks:
        local_dim = _local_dim(call, mesh.size())
        if local_dim is None:
            parts.append(mask.clone())
        else:
            dim, layout = local_dim
            parts.append(mode.shard(mask, dim=dim, sequence=layout))
    return [x.requires_grad_(call.gradients and x.is_floating_point()) for x in parts]


def _local_dim(call: DrawnCall, ranks: int) -> tuple[int, SequenceLayout] | None:
    """Return the mask dim of which a rank gets its part, with its layout, or None if that part would be ambiguous.

    It is ambiguous if each rank has one token, because size 1 would broadcast. It is also ambiguous if no rank has more
    than one token and the part is ``[..., 1, 1]``, which may belong to a query or a key and raises.
    """
    if call.mask is None or not call.mask.local or call.mask.local not in call.mask.dims:
        return None
    queries, keys = call.layouts(ranks)
    (dim, layout), (other, length) = ((2, queries), ("k", keys.total))
    if call.mask.local == "k":
        (dim, layout), (other, length) = ((3, keys), ("q", queries.total))
    is_ambiguous = max(layout.sizes()) <= 1 and (length == 1 or other not in call.mask.dims)
    return None if is_ambiguous or set(layout.sizes()) == {1} else (dim, layout)


def _other(layouts: tuple[SequenceLayout, SequenceLayout]) -> SequenceLayout | None:
    return None if layouts[1] is layouts[0] else layouts[1]


def _positions(layout: SequenceLayout, rank: int) -> Tensor:
    positions = [start + i for start, length in layout.runs(rank) for i in range(length)]
    return torch.tensor(positions, dtype=torch.long)


def _held(x: Tensor, dim: int, layout: SequenceLayout, mesh: DeviceMesh) -> Tensor:
    return x.index_select(dim, _positions(layout, mesh.get_rank()))


def _error_of_out(call: DrawnCall, out: Tensor, positions: Tensor) -> float:
    expected = call.attend(call.tensors, alone=True).index_select(2, positions)
    if call.dtype == torch.float32:
        difference, allowed = _norms_over_ranks(out - expected, expected)
        return _ratio(difference, FLOAT32_BOUND * allowed)
    doubles = [x.double() if x.is_floating_point() else x for x in call.tensors]
    exact = call.attend(doubles, alone=True).index_select(2, positions)
    difference, of_sdpa, size = _norms_over_ranks(out - exact, expected - exact, exact)
    return _ratio(difference, 2 * of_sdpa + torch.finfo(call.dtype).eps / 2 * size)


def _norms_over_ranks(*parts: Tensor) -> list[float]:
    squares = torch.stack([part.double().square().sum() for part in parts])
    dist.all_reduce(squares)
    norms: list[float] = squares.sqrt().tolist()
    return norms


def _errors_of_gradients(call: DrawnCall, parts: list[Tensor], weight: Tensor, mesh: DeviceMesh) -> list[float]:
    """Return the errors of the gradients of the sum of all ranks' losses. Gradients of replicated tokens are added over
    ranks.
    """
    queries, keys = call.layouts(mesh.size())
    whole = _sum_over_ranks(weight, (2, queries), [*weight.shape[:2], queries.total, weight.shape[3]], mesh)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in call.tensors]
    (call.attend(leaves, alone=True) * whole).sum().backward()
    local_dims = [(2, queries), (2, keys), (2, keys), _local_dim(call, mesh.size())]
    smallest, errors = leaves[2].grad, []
    for leaf, part, local_dim in zip(leaves, parts, local_dims, strict=False):
        if not leaf.requires_grad:
            continue
        grad = part.new_zeros(part.shape) if part.grad is None else part.grad
        summed = _sum_over_ranks(grad, local_dim, leaf.shape, mesh)
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        scale = max(float(x.norm()) for x in (expected, smallest) if x is not None)
        errors.append(_ratio(float((summed - expected).norm()), FLOAT32_BOUND * scale))
    return errors


def _sum_over_ranks(part: Tensor, local_dim: tuple[int, SequenceLayout] | None, shape: Any, mesh: DeviceMesh) -> Tensor:
    whole = part.new_zeros(shape)
    if local_dim is None:
        whole += part
    else:
        whole.index_add_(local_dim[0], _positions(local_dim[1], mesh.get_rank()), part)
    dist.all_reduce(whole)
    return whole


def _ratio(difference: float, allowed: float) -> float:
    """Return ``difference`` divided by the allowed difference: 0 if there is none, infinite if it is NaN."""
    if difference == 0.0:
        return 0.0
    return difference / max(allowed, 1e-30) if difference == difference else float("inf")
