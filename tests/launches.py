"""Launches of one attention call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from benchmarks.harness import fake_group
from para_core import SequenceLayout, UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention import local, usp
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.masks import MaskExtents, mask_of_block
from para_core.attention.spec import AttentionSpec
from para_core.distributed.mesh import sequence_mesh
from para_core.layout.sequence import even_layout
from para_core.option_values import Backend, RotateMethod
from para_core.recorder.run_counter import RunCounter

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]


def count_attention(
    ring: int,
    ulysses: int,
    *,
    tokens: int = 288,
    heads: int = 24,
    head_dim: int = 16,
    batch: int = 1,
    device: Literal["cpu", "meta"] = "cpu",
    backend: Backend | None = None,
    rotate_method: RotateMethod = "alltoall",
    comm_dtype: torch.dtype | None = None,
    mask: Tensor | None = None,
) -> RunCounter:
    """Return the launches of one intercepted forward call on rank 0. It is the second call, when sizes are known.

    288 × 24 tokens × heads are sharded like FLUX's 4608 × 24 at 1024². ``device="meta"`` gives the launches of CUDA for
    bfloat16 with the flash backend, or with ``backend``. ``mask`` is over all tokens: ``[B or 1, H or 1, S or 1, S]``.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with fake_group(ring * ulysses), torch.no_grad():
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
        layout = even_layout(tokens, ring * ulysses)
        # The projections of a model return [B, S, H, D] in memory.
        shape = (batch, layout.size(0), heads, head_dim)
        tensors = [torch.empty(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)]
        options = {"backend": backend, "rotate_method": rotate_method}
        if comm_dtype is not None:
            options["comm_dtype"] = comm_dtype
        on_device = _intercepted if device == "cpu" else _as_on_cuda
        with on_device(mesh, layout, heads, options) as attend:
            attend(*tensors, mask)
            with RunCounter() as counter:
                attend(*tensors, mask)
    return counter


@contextmanager
def _intercepted(mesh: DeviceMesh, layout: SequenceLayout, _: int, options: dict[str, Any]) -> Iterator[Attend]:
    passed = {name: value for name, value in options.items() if name != "backend"}
    with UnifiedAttnMode(mesh, layout=layout, assume_equal=True, **passed):
        yield F.scaled_dot_product_attention


@contextmanager
def _as_on_cuda(mesh: DeviceMesh, layout: SequenceLayout, heads: int, given: dict[str, Any]) -> Iterator[Attend]:
    """Run the code that the attention operator runs on a GPU. A mode stops earlier, at the shapes of meta tensors."""
    options = AttnOptions.of(**given)
    text = options.as_text()
    spec = AttentionSpec(layout, layout, sequence_mesh(mesh), heads, heads, options=options, options_text=text)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        plan = AttentionPlan(spec)
        if mask is not None:
            extents = MaskExtents("broadcast" if mask.shape[2] == 1 else "global", "global")
            mask = mask_of_block(mask, extents, plan)
        return usp.usp_forward(plan, query, key, value, mask)

    def choose(call: LocalAttentionCall) -> int:
        # FlashAttention takes no mask on a GPU.
        backend = SDPBackend.FLASH_ATTENTION if call.mask is None else SDPBackend.EFFICIENT_ATTENTION
        return int(backend.value)

    def sdpa(call: LocalAttentionCall, backend: Backend | None) -> Tensor:
        # SDPA computes meta tensors by matrix products, and GPU tensors by the single kernel that is called here.
        return local.local_attention_with_lse(call, backend)[0]

    with mock.patch.object(local, "choose_backend", choose), mock.patch.object(usp, "local_attention", sdpa):
        yield attend
