"""The merge of partial results as one operator: one launch, whatever computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import merge_reference
from para_core.triton_support import are_floats, load_kernel, on_device_of

define_operator("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")
define_operator("merge_(Tensor(a!) out_a, Tensor(b!) lse_a, Tensor out_b, Tensor lse_b) -> ()")


def _merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`para_core.kernels.merge_reference.merge` in few operators, without a gradient; ``out`` is in the dtype of lse."""
    # b weighs exp(lse_b) / (exp(lse_a) + exp(lse_b)); of two rows without a key, -inf - -inf, any weight will do.
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(0.5).unsqueeze(-1)
    if out_a.dtype != lse_a.dtype:  # even a cast to the same dtype takes as long as an addition of few numbers
        out_a = out_a.to(lse_a.dtype)
    if out_b.dtype != lse_a.dtype:
        out_b = out_b.to(lse_a.dtype)
    out, lse = (None, None) if into is None else into
    return torch.lerp(out_a, out_b, weight, out=out), torch.logaddexp(lse_a, lse_b, out=lse)


def _merge_in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    _merge(out_a, lse_a, out_b, lse_b, into=(out_a, lse_a))


def merge_on_gpu(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    fused = load_kernel("merge", out_a.device)
    if fused is None or not are_floats(out_a, lse_a, out_b, lse_b):
        return _merge(out_a, lse_a, out_b, lse_b)
    with on_device_of(out_a):
        merged: tuple[Tensor, Tensor] = fused.merge(out_a, lse_a, out_b, lse_b, into=_room(out_a, lse_a))
    return merged


def merge_on_gpu_in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    fused = load_kernel("merge", out_a.device)
    if fused is None or not are_floats(out_a, lse_a, out_b, lse_b):
        _merge_in_place(out_a, lse_a, out_b, lse_b)
        return
    with on_device_of(out_a):
        fused.merge(out_a, lse_a, out_b, lse_b, into=(out_a, lse_a))


def _room(out_a: Tensor, lse_a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_a, dtype=lse_a.dtype), torch.empty_like(lse_a)


LIBRARY.impl("merge", _merge, "CompositeExplicitAutograd")
LIBRARY.impl("merge", merge_on_gpu, "CUDA")
LIBRARY.impl("merge_", _merge_in_place, "CompositeExplicitAutograd")
LIBRARY.impl("merge_", merge_on_gpu_in_place, "CUDA")
torch.library.register_fake("para_core::merge", _room, lib=LIBRARY)
torch.library.register_fake("para_core::merge_", lambda *_: None, lib=LIBRARY)


class Merged:
    """Partial results of the same queries, merged as they come.

    Attributes:
        count: how many have come.
        out, lse: so far. Of two and more, ``out`` is in the dtype of lse: it is rounded once, by who takes it.
    """

    out: Tensor
    lse: Tensor

    def __init__(self) -> None:
        self.count = 0

    def add(self, out: Tensor, lse: Tensor) -> None:
        """:func:`para_core.kernels.merge_reference.merge` with what has come; differentiable where gradients are."""
        self.count += 1
        if self.count == 1:
            self.out, self.lse = out, lse
        elif torch.is_grad_enabled():
            self.out, self.lse = merge_reference.merge(self.out.to(self.lse.dtype), self.lse, out, lse)
        elif self.count == 2:
            # Not in place: the first is what attention gave, which may be a user's own.
            self.out, self.lse = torch.ops.para_core.merge.default(self.out, self.lse, out, lse)
        else:
            torch.ops.para_core.merge_.default(self.out, self.lse, out, lse)

    def replace(self, out: Tensor, lse: Tensor) -> None:
        """Take what was computed on from what has come."""
        self.count += 1
        self.out, self.lse = out, lse
