"""The caller of xDiT: its attention ``USP``, and the function of its Wan transformer that pads and shards tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.rows import Call, RankOutput, Row, Setting, mask_forms


@dataclass(frozen=True)
class Cosmos3(Row):
    """Generated tokens in a layer of diffusers' Cosmos 3 with random weights. Every rank has the text."""

    keys: int = 0  # This is the number of keys of the text.
    copies: int = 1  # On one device each key of the text occurs this many times.

    def parts(self) -> tuple[torch.nn.Module, Tensor, Tensor, Tensor]:
        """Return the layer, the hidden states of text and generated tokens, and the angles of their positions."""
        from diffusers.models.transformers.transformer_cosmos3 import Cosmos3PackedMoTAttention

        torch.manual_seed(0)
        layer = Cosmos3PackedMoTAttention(self.H * self.D, self.D, self.H, self.H, False, 1e-6)
        hidden = torch.randn(self.keys + self.S, self.H * self.D)
        return layer, *hidden.split([self.keys, self.S]), torch.randn(self.keys + self.S, self.D)

    def on_one_device(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the output of the generated tokens ``[1, 1, S, H * D]``."""
        layer, text, generated, angles = self.parts()
        text, text_angles = text.repeat(self.copies, 1), angles[: self.keys].repeat(self.copies, 1)
        return [_cosmos3(layer, text, generated, text_angles, angles[self.keys :])]


COSMOS3 = (
    Cosmos3("Cosmos 3, no text"),
    Cosmos3("Cosmos 3, 32 keys of text", keys=32),
    Cosmos3("Cosmos 3, 32 keys of text, against each key twice", keys=32, copies=2),
)


def _cosmos3(layer: torch.nn.Module, text: Tensor, generated: Tensor, *angles: Tensor) -> Tensor:
    with torch.no_grad():
        rotary = [turn(x) for x in angles for turn in (torch.cos, torch.sin)]
        return layer(text, generated, tuple(rotary))[1][None, None]


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
    """Import xDiT before ranks are forked."""
    if stand_ins:
        kernels.for_aten()
    # xDiT raises at import if there is no accelerator. With Apple's it uses gloo.
    torch.backends.mps.is_available = lambda: True
    from xfuser.model_executor.layers import usp
    from xfuser.model_executor.models.transformers import transformer_wan  # noqa: F401
    from yunchang.globals import PROCESS_GROUP

    usp.PROCESS_GROUP = PROCESS_GROUP  # xDiT imports the groups only if CUDA is available.


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return PyTorch's backends with all forms of a mask, then the same with the number of valid keys if the row is
    padded.
    """
    backends = ("SDPA",) if ring == 1 else ("SDPA_FLASH", "SDPA_EFFICIENT", "SDPA_MATH")
    plain = [{**form, "backend": backend} for form in mask_forms(row, ulysses) for backend in backends]
    if row.S_k is not None:
        # Its Wan replicates all keys of the text, so cross-attention sends nothing.
        return [{"backend": "SDPA", "function": "attention"}, *plain]
    if row.mask or not row.S % (ring * ulysses):
        return plain
    # Its Wan does not pass this argument of USP.
    return plain + [{**setting, "valid_kv_len": True, "by hand": "with `valid_kv_len`"} for setting in plain]


def attend(call: Call) -> RankOutput:
    """Run one call with layout ``[B, H, S, D]``. Outputs of padding are removed, as its transformers do."""
    from xfuser.model_executor.layers import usp
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    row, rank, world = call.row, dist.get_rank(), dist.get_world_size()
    _set_state(call)
    if isinstance(row, Cosmos3):
        return _attend_cosmos3(row, rank, world)

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
        mask = F.pad(mask, (0, -mask.shape[-1] % world))  # With False, padding is not attended to.
    out = call.compiled(run)(*leaves, mask)
    return call.finish(out[:, :, valid[0]], leaves, positions, key_positions)


def _attend_cosmos3(row: Cosmos3, rank: int, world: int) -> RankOutput:
    """Run the layer with xDiT's processor on this rank's part of the generated tokens."""
    from xfuser.model_executor.models.transformers import transformer_cosmos3

    transformer_cosmos3.get_sequence_parallel_world_size = lambda: world
    layer, text, generated, angles = row.parts()
    layer.processor = transformer_cosmos3.xFuserCosmos3AttnProcessor()
    positions = torch.arange(row.S).chunk(world)[rank]
    out = _cosmos3(layer, text, generated[positions], angles[: row.keys], angles[row.keys :][positions])
    return RankOutput(out, positions, positions, [])


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
