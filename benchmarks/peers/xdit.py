"""The caller of xDiT: its attention ``USP``, and the function of its Wan transformer that pads and shards tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.call import Call, RankOutput, Row, Setting, mask_forms


@dataclass
class _PipelineState:
    """The part of xDiT's pipeline state that ``USP`` reads: full attention, no 8-bit communication."""

    attention_backend: Any
    fp8_comms: None = None
    use_spargeattn_head_balance: bool = False

    @property
    def runtime_config(self) -> _PipelineState:
        return self


def prepare(*, stand_ins: bool) -> None:
    """Import xDiT, before ranks are forked."""
    if stand_ins:
        kernels.for_aten()
    # xDiT raises at import if there is no accelerator. With Apple's it uses gloo.
    torch.backends.mps.is_available = lambda: True
    from xfuser.model_executor.layers import usp
    from xfuser.model_executor.models.transformers import transformer_wan  # noqa: F401
    from yunchang.globals import PROCESS_GROUP

    usp.PROCESS_GROUP = PROCESS_GROUP  # xDiT imports the groups only if CUDA is available


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return PyTorch's backends with all forms of a mask, then the same with the number of valid keys if padded."""
    backends = ("SDPA",) if ring == 1 else ("SDPA_FLASH", "SDPA_EFFICIENT", "SDPA_MATH")
    plain = [{**form, "backend": backend} for form in mask_forms(row, ulysses) for backend in backends]
    if row.S_k is not None:
        # Its Wan keeps all keys of the text on every rank: cross-attention sends nothing.
        return [{"backend": "SDPA", "function": "attention"}, *plain]
    if row.mask or not row.S % (ring * ulysses):
        return plain
    # Its Wan does not pass this argument of USP.
    return plain + [{**setting, "valid_kv_len": True, "by hand": "with `valid_kv_len`"} for setting in plain]


def attend(call: Call) -> RankOutput:
    """Run one call; layout ``[B, H, S, D]``. Outputs of padding are cut off, as its transformers do."""
    from xfuser.model_executor.layers import usp
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    row, rank, world = call.row, dist.get_rank(), dist.get_world_size()
    _set_state(call)

    def cut(x: Tensor) -> Tensor:
        chunk = xFuserWanTransformer3DWrapper._chunk_and_pad_sequence
        return chunk(None, x, rank, world, -x.shape[2] % world, dim=2)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if "function" in call.setting:
            return usp.attention(q, k, v, is_causal=row.is_causal)
        options = {} if mask is None else {"attn_mask": mask}
        if "valid_kv_len" in call.setting:
            options["valid_kv_len"] = row.S_k or row.S
        repeat = {} if row.H_kv is None else {"kv_head_repeat": row.H // row.H_kv}
        if not row.text_whole:
            return usp.USP(q, k, v, is_causal=row.is_causal, attention_kwargs=options, **repeat)
        text, image = zip(*(x.split([row.text, x.shape[2] - row.text], dim=2) for x in (q, k, v)), strict=True)
        joint = dict(zip(("joint_query", "joint_key", "joint_value"), text, strict=True), joint_strategy="front")
        return usp.USP(*image, attention_kwargs=options, **joint)

    # Padding has the position -1.
    leaves, numbers = call.tokens(cut), list(call.positions(lambda x: cut(x + 1) - 1))
    if "function" in call.setting:
        leaves[1:], numbers[1] = row.qkv()[1:], torch.arange(row.S_k or row.S)
    valid = [positions >= 0 for positions in numbers]
    positions, key_positions = (x[kept] for x, kept in zip(numbers, valid, strict=True))
    mask = call.mask(positions, key_positions)
    if mask is not None and mask.shape[-1] == (row.S_k or row.S):
        mask = F.pad(mask, (0, -mask.shape[-1] % world))  # False: padding is not attended to
    out = call.compiled(run)(*leaves, mask)
    return call.finish(out[:, :, valid[0]], leaves, positions, key_positions)


def _set_state(call: Call) -> None:
    """Set the groups and sizes that ``USP`` looks up, as xDiT's own set-up does on GPUs."""
    from xfuser.core.distributed.attention_backend import AttentionBackendType
    from xfuser.model_executor.layers import usp
    from yunchang import set_seq_parallel_pg

    rank, world = dist.get_rank(), dist.get_world_size()
    set_seq_parallel_pg(call.ulysses, call.ring, rank, world)
    state = _PipelineState(AttentionBackendType[call.setting["backend"]])
    usp.get_runtime_state = lambda: state
    usp.get_sequence_parallel_world_size = lambda: world
    usp.get_ulysses_parallel_world_size = lambda: call.ulysses
    usp.get_ring_parallel_world_size = lambda: call.ring
    usp.get_ulysses_parallel_rank = lambda: rank % call.ulysses
