"""ParaAttention: ``UnifiedAttnMode`` on a mesh of ``init_context_parallel_mesh``, as its README says."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.call import Call, Part, Setting, mask_forms
from benchmarks.peers.rows import Row

PACKAGES = ("para-attn",)
WAYS = ("Ulysses", "ring", "2 × 2")
PATCHES = [
    (
        "ring, 2 × 2: of its kernels always `efficient_attention_forward_with_lse`, where its own choice asserts CUDA tensors;"
        " a CPU kernel for that one's `aten::_scaled_dot_product_efficient_attention`"
    ),
]


def prepare(*, stand_ins: bool) -> None:
    """Import it, before ranks are forked."""
    import para_attn
    import para_attn.context_parallel

    if stand_ins:
        kernels.for_aten()
        para_attn.ops._attention_forward_with_lse = para_attn.ops.efficient_attention_forward_with_lse


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Its README says nothing of masks: whole first."""
    return mask_forms(row, ulysses)


def attend(call: Call) -> Part:
    """One call of SDPA inside the mode."""
    from para_attn import UnifiedAttnMode
    from para_attn import primitives as parallel
    from para_attn.context_parallel import init_context_parallel_mesh

    row = call.row
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=call.ring)

    def cut(x: Tensor) -> Tensor:
        return parallel.get_assigned_chunk(x, dim=2)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        options = {"enable_gqa": True} if row.H_kv is not None else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=row.is_causal, **options)

    leaves, positions = call.tokens(cut), call.positions(cut)
    run = call.compiled(run)
    with UnifiedAttnMode(mesh):
        out = run(*leaves, call.mask(*positions))
    return call.finish(out, leaves, *positions)
