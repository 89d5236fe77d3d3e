"""PyTorch's ``torch.distributed.tensor.experimental.context_parallel``, a ring, as its tutorial says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.call import Call, Part, Setting, mask_forms
from benchmarks.peers.rows import Row

PACKAGES: tuple[str, ...] = ()
WAYS = ("ring",)
PATCHES = [
    (
        "`F.scaled_dot_product_attention` calls the operator that it would call on a GPU (memory-efficient; FlashAttention is"
        " tried next), with a CPU kernel for it; last, `SDPBackend.MATH`, unpatched"
    ),
    (
        "`_cp_options.enable_load_balance = False` where not `is_causal`, as PyTorch's own tests do; its default refuses"
        " whatever is not causal"
    ),
]


def prepare(*, stand_ins: bool) -> None:
    """Import it, before ranks are forked."""
    import torch.distributed.tensor.experimental  # noqa: F401

    if stand_ins:
        kernels.for_aten()


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Each operator that it can distribute, then the math backend, whose products and softmax DTensor distributes."""
    if not stand_ins:
        return [{**form, "operator": None} for form in mask_forms(row, ulysses)]
    operators = ("efficient", "flash", "math")
    found = [{**form, "operator": operator} for operator in operators for form in mask_forms(row, ulysses)]
    # First what a GPU would do, then what most often is exact: an attempt takes seconds here.
    likely = [setting for setting in found if setting == {"mask": "rows", "by hand": True, "operator": "math"}]
    return [found[0], *likely, *(setting for setting in found[1:] if setting not in likely)]


def attend(call: Call) -> Part:
    """One call of SDPA inside ``context_parallel``, which shards its buffers in place."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    row = call.row
    mesh = init_device_mesh("cpu", (call.ring,), mesh_dim_names=("cp",))
    _attention._cp_options.enable_load_balance = row.is_causal
    if call.setting["operator"] not in (None, "math"):
        F.scaled_dot_product_attention = _as_on_a_gpu(call.setting["operator"])
    # What it shards it gives back whole at the end, so copies are sharded, once each for the callbacks below.
    whole = [*row.qkv(), *(torch.arange(n).view(1, 1, n, 1) for n in (row.S, row.S_k or row.S))]
    parts = [part for x in whole for part in x.split([row.text, x.shape[2] - row.text] if row.text else x.shape[2], 2)]
    parts = [part.clone() for part in parts]
    cut_ones = [x for i, x in enumerate(parts) if not (row.text_whole and i % 2 == 0)]

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        options = {"enable_gqa": True} if row.H_kv is not None else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=row.is_causal, **options)

    only_math = sdpa_kernel(SDPBackend.MATH) if call.setting["operator"] == "math" else contextlib.nullcontext()
    with only_math, context_parallel(mesh, buffers=cut_ones, buffer_seq_dims=[2] * len(cut_ones)):
        each = 2 if row.text else 1
        joined = [torch.cat(parts[i : i + each], dim=2) for i in range(0, len(parts), each)]
        leaves = [x.requires_grad_(row.backward) for x in joined[:3]]
        positions = [x.flatten() for x in joined[3:]]
        out = call.compiled(run)(*leaves, call.mask(*positions))
        return call.finish(out, leaves, *positions)


def _as_on_a_gpu(operator: str) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        if operator == "efficient":
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, True, **options
            )[0]
        if attn_mask is not None:
            raise RuntimeError("FlashAttention takes no attn_mask (stand-in)")
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]

    return scaled_dot_product_attention
