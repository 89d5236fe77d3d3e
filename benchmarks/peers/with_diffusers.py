"""diffusers' native context parallelism, through ``dispatch_attention_fn``, which its attention processors call."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.call import Call, Part, Setting, mask_forms
from benchmarks.peers.rows import Row

PACKAGES = ("diffusers",)
WAYS = ("Ulysses", "ring", "2 × 2")
PATCHES = [
    (
        "ring, 2 × 2: backend `_native_cudnn`, which returns a log-sum-exp and takes masks, with a CPU kernel for its"
        " `aten::_scaled_dot_product_cudnn_attention`"
    ),
]


def prepare(*, stand_ins: bool) -> None:
    """Import it, before ranks are forked."""
    import diffusers.models.attention_dispatch  # noqa: F401

    if stand_ins:
        kernels.for_aten()


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """As its plans shard a mask of keys, then all others; then once more with ``ulysses_anything`` or ``ring_anything``."""
    # Its `_cp_plan`s shard masks of keys like the keys, and its Ulysses gathers them.
    forms = mask_forms(row, ulysses, first="columns" if row.mask == "padding" else "whole")
    backend = "_native_cudnn" if ring > 1 and stand_ins else "native"
    plain = [{**form, "backend": backend} for form in forms]
    if ring > 1 and ulysses > 1:
        return plain  # "cannot be enabled when" both are
    anything = {"ring_anything" if ring > 1 else "ulysses_anything": True}
    anyhow = [{**setting, **anything} for setting in plain]
    # Its documentation says which of the two an uneven row is for.
    return anyhow + plain if row.S % (ring * ulysses) or row.H % ulysses else plain + anyhow


def attend(call: Call) -> Part:
    """One call of ``dispatch_attention_fn``, set up as ``enable_parallelism`` does; layout ``[B, S, H, D]``."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    row = call.row
    anything = {name: True for name in call.setting if name.endswith("_anything")}
    config = ContextParallelConfig(ring_degree=call.ring, ulysses_degree=call.ulysses, **anything)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    shard = PartitionAnythingSharder.shard_anything if anything else EquipartitionSharder.shard

    def cut(x: Tensor) -> Tensor:
        return shard(x, 2, config._flattened_mesh)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = dispatch_attention_fn(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=mask,
            is_causal=row.is_causal,
            enable_gqa=row.H_kv is not None,
            backend=call.setting["backend"],
            parallel_config=parallel,
        )
        return out.transpose(1, 2)

    leaves, positions = call.tokens(cut), call.positions(cut)
    out = call.compiled(run)(*leaves, call.mask(*positions))
    return call.finish(out, leaves, *positions)
