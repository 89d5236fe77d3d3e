"""yunchang (USP): ``LongContextAttention``, as its README says; for Ulysses alone ``UlyssesAttention``."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.call import Call, Part, Setting
from benchmarks.peers.rows import Row

PACKAGES = ("yunchang",)
WAYS = ("Ulysses", "ring", "2 × 2")
PATCHES = [
    "a module `flash_attn` for the CPU, for its default `AttnType.FA`",
    "a CPU kernel for `aten::_scaled_dot_product_efficient_attention`, for `AttnType.TORCH_EFFICIENT`, which is tried next",
    "gradients are asked for in bfloat16, the only kind of dtype that FlashAttention takes",
]


def prepare(*, stand_ins: bool) -> None:
    """Import it, before ranks are forked."""
    if stand_ins:
        kernels.for_aten()
        kernels.for_flash_attn()  # before: it looks for flash_attn once, when imported
    import yunchang  # noqa: F401


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Its default kernel, then what its README names for devices without FlashAttention."""
    # Its backward for FlashAttention counts on `.to(float32)` being a copy, so it wants what FlashAttention takes.
    half = {"dtype": "bfloat16"} if row.backward else {}
    found: list[Setting] = [{"attn_type": "FA", **half}, {"attn_type": "TORCH_EFFICIENT"}]
    if ring == 1:
        # LongContextAttention's backward sends to itself where the ring has one rank, and gloo cannot.
        found.insert(0, {"attn_type": "FA", "module": "UlyssesAttention"})
    return found


def attend(call: Call) -> Part:
    """One call of the module; layout ``[B, S, H, D]``, every rank's part by ``EXTRACT_FUNC_DICT``."""
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

    leaves, positions = call.tokens(cut), call.positions(cut)
    out = call.compiled(run)(*leaves, call.mask(*positions))
    return call.finish(out, leaves, *positions)
