"""The caller of each peer: its packages, meshes and settings, and one call. docs/measured/peers.md describes the
patches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import servers, xdit
from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.rows import MASKED_TEXT, Call, RankOutput, Row, Setting, mask_forms


@dataclass(frozen=True)
class Caller:
    """A peer, and the functions that call it.

    Args:
        packages: the packages whose versions are recorded in addition to torch.
        prepare: a function that imports the peer before ranks are forked. ``stand_ins`` adds kernels for the CPU.
        settings: a function that returns the settings of a row, in the order in which they are tried.
        attend: a function that makes one call on one rank.
        ways: the ways of "Ulysses", "ring" and "2 × 2" that the peer has.
        own_rows: further rows for this peer, on 2 ranks.
        facts: results without attention, for the JSON.
    """

    packages: tuple[str, ...]
    prepare: Callable[..., None]
    settings: Callable[..., list[Setting]]
    attend: Callable[[Call], RankOutput]
    ways: tuple[str, ...] = ("Ulysses", "ring", "2 × 2")
    own_rows: tuple[Row, ...] = ()
    facts: Callable[[], dict[str, Any]] = dict


# -- para_core, called as docs/own_model.md says. It needs no stand-ins, and takes whole masks.


def _attend_para_core(call: Call) -> RankOutput:
    """Run one call through the mode."""
    from para_core import Segment, SequenceLayout, UnifiedAttnMode

    mesh = init_device_mesh("cpu", (call.ring, call.ulysses), mesh_dim_names=("ring", "ulysses"))
    row, layout = call.row, None
    if row.text:
        text = Segment("text", row.text, replicated=row.text_whole)
        layout = SequenceLayout((text, Segment("image", row.S - row.text)), mesh.size())
    with UnifiedAttnMode(mesh, layout=layout) as cp:

        def cut(x: Tensor) -> Tensor:
            return cp.shard(x, dim=2, sequence=cp.sequence(x.shape[2]))

        return call.run(cut, row.sdpa)


# -- diffusers' native context parallelism, and cache-dit's: ``dispatch_attention_fn``, which their processors call.


def _prepare_diffusers(*, stand_ins: bool) -> None:
    """Import diffusers before ranks are forked."""
    import diffusers.models.attention_dispatch  # noqa: F401

    if stand_ins:
        kernels.for_aten()


def _settings_diffusers(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return the forms in which its plans shard masks, then all others. Both also come with ``…_anything``."""
    backend = "_native_cudnn" if ring > 1 and stand_ins else "native"
    if ring > 1 and ulysses > 1:
        # diffusers says "cannot be enabled when" both are given.
        return _settings_of_dispatch(row, ring, ulysses, backend, None)
    return _settings_of_dispatch(row, ring, ulysses, backend, "ring_anything" if ring > 1 else "ulysses_anything")


def _settings_of_dispatch(row: Row, ring: int, ulysses: int, backend: str, anything: str | None) -> list[Setting]:
    # Its `_cp_plan`s shard masks of keys like the keys, and its Ulysses gathers them.
    forms = mask_forms(row, ulysses, first="columns" if row.mask == "padding" else "whole")
    plain = [{**form, "backend": backend} for form in forms]
    anyhow = [{**setting, anything: True} for setting in plain if anything is not None]
    # Its documentation says which of the two is meant for an uneven row.
    return anyhow + plain if row.S % (ring * ulysses) or row.H % ulysses else plain + anyhow


def _attend_diffusers(call: Call) -> RankOutput:
    """Run one call, set up as ``enable_parallelism`` does."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    shard = EquipartitionSharder.shard, PartitionAnythingSharder.shard_anything
    return _dispatch(
        call, ContextParallelConfig, lambda x: ParallelConfig(context_parallel_config=x), shard, dispatch_attention_fn
    )


def _prepare_cache_dit(*, stand_ins: bool) -> None:
    """Import cache-dit before ranks are forked."""
    import cache_dit.attention.backends.register  # noqa: F401
    from cache_dit.distributed.core import _templated_ring

    if stand_ins:
        kernels.for_aten()
        _templated_ring.fused_merge_attn_states = None  # It then merges in PyTorch, with its own code.


def _settings_cache_dit(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return its native backend, with ``ulysses_anything`` where that is allowed."""
    return _settings_of_dispatch(row, ring, ulysses, "native", "ulysses_anything" if ring == 1 else None)


def _attend_cache_dit(call: Call) -> RankOutput:
    """Run one call, set up as its ``_enable_context_parallelism`` does."""
    from cache_dit.attention.backends.register import _dispatch_attention_fn
    from cache_dit.distributed.core._context_parallel import _EquipartitionSharder, _PartitionAnythingSharder
    from cache_dit.distributed.core._modeling_parallel import _ContextParallelConfig

    shard = _EquipartitionSharder.shard, _PartitionAnythingSharder.shard_anything
    return _dispatch(call, _ContextParallelConfig, lambda x: x, shard, _dispatch_attention_fn)


def _dispatch(
    call: Call,
    make: Callable[..., Any],
    parallel_of: Callable[[Any], Any],
    shards: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    attend: Callable[..., Any],
) -> RankOutput:
    """Run one call of ``dispatch_attention_fn`` with layout ``[B, S, H, D]``. ``shards`` has functions for equal parts
    and for any parts.
    """
    row = call.row
    anything = {name: True for name in call.setting if name.endswith("_anything")}
    config = make(ring_degree=call.ring, ulysses_degree=call.ulysses, **anything)
    parallel, shard = parallel_of(config), shards[bool(anything)]
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)

    def cut(x: Tensor) -> Tensor:
        return shard(x, 2, config._flattened_mesh)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = attend(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=mask,
            is_causal=row.is_causal,
            enable_gqa=row.H_kv is not None,
            backend=call.setting["backend"],
            parallel_config=parallel,
        )
        return out.transpose(1, 2)

    return call.run(cut, run)


# -- ParaAttention: ``UnifiedAttnMode`` on a mesh of ``init_context_parallel_mesh``, as its README says.


def _prepare_para_attn(*, stand_ins: bool) -> None:
    """Import ParaAttention before ranks are forked."""
    import para_attn
    import para_attn.context_parallel

    if stand_ins:
        kernels.for_aten()
        para_attn.ops._attention_forward_with_lse = para_attn.ops.efficient_attention_forward_with_lse


def _attend_para_attn(call: Call) -> RankOutput:
    """Run one call of SDPA inside the mode."""
    from para_attn import UnifiedAttnMode
    from para_attn import primitives as parallel
    from para_attn.context_parallel import init_context_parallel_mesh

    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=call.ring)

    def cut(x: Tensor) -> Tensor:
        return parallel.get_assigned_chunk(x, dim=2)

    leaves, positions = call.tokens(cut), call.positions(cut)
    with UnifiedAttnMode(mesh):
        out = call.compiled(call.row.sdpa)(*leaves, call.mask(*positions))
    return call.finish(out, leaves, *positions)


# -- yunchang (USP): ``LongContextAttention``, as its README says, and ``UlyssesAttention`` for Ulysses alone.


def _prepare_yunchang(*, stand_ins: bool) -> None:
    """Import yunchang before ranks are forked."""
    if stand_ins:
        kernels.for_aten()
        kernels.for_flash_attn()  # Do this first, because it looks for flash_attn once, when it is imported.
    import yunchang  # noqa: F401


def _settings_yunchang(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return its default kernel, then the one that its README names for devices without FlashAttention."""
    # Its backward for FlashAttention relies on `.to(float32)` being a copy, so it needs dtypes that FlashAttention
    # accepts.
    half = {"dtype": "bfloat16"} if row.backward else {}
    settings: list[Setting] = [{"attn_type": "FA", **half}, {"attn_type": "TORCH_EFFICIENT"}]
    if ring == 1:
        # LongContextAttention's backward sends to itself if the ring has one rank, which gloo cannot do.
        settings.insert(0, {"attn_type": "FA", "module": "UlyssesAttention"})
    return settings


def _attend_yunchang(call: Call) -> RankOutput:
    """Run one call of the module with layout ``[B, S, H, D]``. ``EXTRACT_FUNC_DICT`` gives the part of each rank."""
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, UlyssesAttention, set_seq_parallel_pg
    from yunchang.globals import PROCESS_GROUP
    from yunchang.kernels import AttnType

    rank, world = dist.get_rank(), dist.get_world_size()
    set_seq_parallel_pg(call.ulysses, call.ring, rank, world)
    attn_type = AttnType[call.setting["attn_type"]]
    if call.setting.get("module") == "UlyssesAttention":
        attention = UlyssesAttention(PROCESS_GROUP.ULYSSES_PG, attn_type=attn_type)
    else:
        attention = LongContextAttention(ring_impl_type="basic", attn_type=attn_type)
    extract = EXTRACT_FUNC_DICT["basic"]

    def cut(x: Tensor) -> Tensor:
        part = extract(x.transpose(1, 2), rank, world_size=world, rd=call.ring, ud=call.ulysses)
        return part.transpose(1, 2)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        options = {} if mask is None else {"attn_mask": mask}
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return attention(q, k, v, causal=call.row.is_causal, **options).transpose(1, 2)

    return call.run(cut, run)


# -- PyTorch's ``torch.distributed.tensor.experimental.context_parallel``, a ring, as its tutorial says.


def _prepare_torch(*, stand_ins: bool) -> None:
    """Import it before ranks are forked."""
    import torch.distributed.tensor.experimental  # noqa: F401

    if stand_ins:
        kernels.for_aten()


def _settings_torch(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return each operator that it distributes, then the math backend, which DTensor distributes."""
    if not stand_ins:
        return [{**form, "operator": None} for form in mask_forms(row, ulysses)]
    operators = ("efficient", "flash", "math")
    settings = [{**form, "operator": operator} for operator in operators for form in mask_forms(row, ulysses)]
    # Try the setting that a GPU would use first, then those that are exact most often, because an attempt takes seconds
    # here.
    likely = [setting for setting in settings if setting == {"mask": "rows", "by hand": True, "operator": "math"}]
    return [settings[0], *likely, *(setting for setting in settings[1:] if setting not in likely)]


def _attend_torch(call: Call) -> RankOutput:
    """Run one call of SDPA inside ``context_parallel``, which shards its buffers in place."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    row = call.row
    mesh = init_device_mesh("cpu", (call.ring,), mesh_dim_names=("cp",))
    _attention._cp_options.enable_load_balance = row.is_causal
    if call.setting["operator"] not in (None, "math"):
        F.scaled_dot_product_attention = _as_on_a_gpu(call.setting["operator"])
    # It shards its buffers in place and restores them at the end, so it gets a copy for each of the callbacks below.
    whole = [*row.qkv(), *(torch.arange(n).view(1, 1, n, 1) for n in (row.S, row.S_k or row.S))]
    parts = [part for x in whole for part in x.split([row.text, x.shape[2] - row.text] if row.text else x.shape[2], 2)]
    parts = [part.clone() for part in parts]
    cut_ones = [x for i, x in enumerate(parts) if not (row.text_whole and i % 2 == 0)]

    only_math = sdpa_kernel(SDPBackend.MATH) if call.setting["operator"] == "math" else contextlib.nullcontext()
    with only_math, context_parallel(mesh, buffers=cut_ones, buffer_seq_dims=[2] * len(cut_ones)):
        each = 2 if row.text else 1
        joined = [torch.cat(parts[i : i + each], dim=2) for i in range(0, len(parts), each)]
        leaves = [x.requires_grad_(row.backward) for x in joined[:3]]
        positions = [x.flatten() for x in joined[3:]]
        out = call.compiled(row.sdpa)(*leaves, call.mask(*positions))
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


CALLERS = {
    "with_para_core": Caller((), lambda **_: None, lambda *_, **__: [{}], _attend_para_core),
    "with_diffusers": Caller(("diffusers",), _prepare_diffusers, _settings_diffusers, _attend_diffusers),
    "with_para_attn": Caller(
        # Its README does not mention masks.
        ("para-attn",),
        _prepare_para_attn,
        lambda row, ring, ulysses, **_: mask_forms(row, ulysses),
        _attend_para_attn,
    ),
    "with_yunchang": Caller(("yunchang",), _prepare_yunchang, _settings_yunchang, _attend_yunchang),
    "with_xdit": Caller(("xfuser",), xdit.prepare, xdit.settings, xdit.attend, own_rows=xdit.COSMOS3),
    "with_cache_dit": Caller(("cache-dit",), _prepare_cache_dit, _settings_cache_dit, _attend_cache_dit),
    "with_sglang": Caller(
        ("sglang",),
        servers.prepare_sglang,
        servers.settings_sglang,
        servers.attend_sglang,
        own_rows=(MASKED_TEXT,),
        facts=servers.frames,
    ),
    "with_vllm_omni": Caller(
        ("vllm-omni",),
        servers.prepare_vllm_omni,
        servers.settings_vllm_omni,
        servers.attend_vllm_omni,
        own_rows=(MASKED_TEXT,),
    ),
    "with_torch": Caller((), _prepare_torch, _settings_torch, _attend_torch, ways=("ring",)),
}
