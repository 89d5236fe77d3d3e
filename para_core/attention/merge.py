"""Merge partial attention results by their lse, with custom operators. Each operator is one launch on a GPU.

:class:`~para_core.attention.attend.Accumulator` holds a :class:`Merged` for each piece of queries;
:func:`~para_core.attention.local.continue_attention` and :mod:`.blocks` add to it. The kernel is in
``kernels/merge.py``. Tests: tests/kernels/test_small_kernels.py and tests/attention/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator
from para_core.kernels import merge_reference
from para_core.torch_internals import innermost_transform, num_dispatch_modes
from para_core.triton_support import are_floats, load_kernel, on_device_of

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

define_operator("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")
define_operator("merge_(Tensor(a!) out_a, Tensor(b!) lse_a, Tensor out_b, Tensor lse_b) -> ()")


def _merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`para_core.kernels.merge_reference.merge`, but with ``out`` in the dtype of lse. In a row
    without a key, where the reference gives 0, both ``out`` must be 0, or the result is their mean.

    The result is written to ``into``, if it is given. ``out_a`` may be among it only if it has the dtype of
    lse.
    """
    # The weight of b is exp(lse_b) / (exp(lse_a) + exp(lse_b)). If a row has no key on both sides, -inf -
    # -inf is NaN; any weight is then correct, because both results are 0.
    weight = (lse_b - lse_a).sigmoid_().nan_to_num_(0.5).unsqueeze(-1)
    # Test the dtype first, because to() costs the host as much as a small addition even if it does nothing.
    if out_a.dtype != lse_a.dtype:
        out_a = out_a.to(lse_a.dtype)
    if out_b.dtype != lse_a.dtype:
        out_b = out_b.to(lse_a.dtype)
    out, lse = into or (None, None)
    return torch.lerp(out_a, out_b, weight, out=out), torch.logaddexp(lse_a, lse_b, out=lse)


def _merge_in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    _merge(out_a, lse_a, out_b, lse_b, into=(out_a, lse_a))


def merge_on_gpu(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`_merge` by the Triton kernel, or in plain PyTorch if the kernel cannot run here."""
    fused = load_kernel("merge", out_a.device)
    if fused is None or not are_floats(out_a, lse_a, out_b, lse_b):
        return _merge(out_a, lse_a, out_b, lse_b, into=into)
    with on_device_of(out_a):
        merged: tuple[Tensor, Tensor] = fused.merge(
            out_a, lse_a, out_b, lse_b, into=into or _empty_result(out_a, lse_a)
        )
    return merged


def merge_on_gpu_in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merge the second result into ``out_a`` and ``lse_a``, which have the dtype of lse."""
    merge_on_gpu(out_a, lse_a, out_b, lse_b, into=(out_a, lse_a))


def _empty_result(out_a: Tensor, lse_a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_a, dtype=lse_a.dtype), torch.empty_like(lse_a)


LIBRARY.impl("merge", _merge, "CompositeExplicitAutograd")
LIBRARY.impl("merge", merge_on_gpu, "CUDA")
LIBRARY.impl("merge_", _merge_in_place, "CompositeExplicitAutograd")
LIBRARY.impl("merge_", merge_on_gpu_in_place, "CUDA")
torch.library.register_fake("para_core::merge", _empty_result, lib=LIBRARY)
torch.library.register_fake("para_core::merge_", lambda *_: None, lib=LIBRARY)


def _operators(x: Tensor) -> tuple[Merge, Callable[..., None]]:
    """Return the operators that merge results like ``x``, and merge in place; if nothing would see a call but
    their kernels, these functions, because the dispatcher costs the host as much as two of the operators
    inside.
    """
    is_seen = torch.compiler.is_compiling() or type(x) is not Tensor
    if is_seen or num_dispatch_modes() > 0 or innermost_transform() is not None:
        return torch.ops.para_core.merge.default, torch.ops.para_core.merge_.default
    if x.is_cuda:
        return merge_on_gpu, merge_on_gpu_in_place
    return _merge, _merge_in_place


class Merged:
    """An accumulator that merges partial attention results of the same queries.

    Attributes:
        count: Number of partial results that were merged.
        out, lse: The merged result; not set while ``count`` is 0. A result that :meth:`add` merged has
            ``out`` in the dtype of lse, so that the caller rounds it only once.
        choices: The backends that SDPA has chosen for the blocks so far, by their sizes and strides. Written
            and read by :func:`~para_core.attention.local.continue_attention`.
    """

    count = 0
    out: Tensor
    lse: Tensor
    # The operator or function that merges further partial results in place. The second :meth:`add` chooses
    # it; this one remains if :meth:`replace` brought the second result.
    _add_in_place: Callable[..., None] = staticmethod(torch.ops.para_core.merge_.default)

    def __init__(self) -> None:
        self.choices: dict[Any, int] = {}

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result into the accumulator. Differentiable if gradients are enabled.

        The first result is kept as it is, also its dtype. ``out`` is finite also in rows whose ``lse`` is
        -inf, because it is multiplied by 0 there. Whether gradients are enabled must not change between the
        calls for one accumulator.
        """
        self.count += 1
        if self.count == 1:
            self.out, self.lse = out, lse
        elif torch.is_grad_enabled():
            self.out, self.lse = merge_reference.merge(self.out.to(self.lse.dtype), self.lse, out, lse)
        elif self.count == 2:
            # Do not merge in place, because a user's attn_func may still use the first partial result.
            merge, self._add_in_place = _operators(out)
            self.out, self.lse = merge(self.out, self.lse, out, lse)
        else:
            # The tensors of the second step are this object's own, so they may be overwritten.
            self._add_in_place(self.out, self.lse, out, lse)

    def replace(self, out: Tensor, lse: Tensor) -> None:
        """Replace the merged result by one into which a kernel has already merged one more partial result.

        A later :meth:`add` writes to these tensors. So if one follows, nobody else may need them, and ``out``
        has the dtype of lse.
        """
        self.count += 1
        self.out, self.lse = out, lse
