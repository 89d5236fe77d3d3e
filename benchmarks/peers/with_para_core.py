"""para_core, as docs/own_model.md says."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.peers.call import Call, Part, Setting
from benchmarks.peers.rows import Row
from para_core import Segment, SequenceLayout, UnifiedAttnMode

PACKAGES: tuple[str, ...] = ()
WAYS = ("Ulysses", "ring", "2 × 2")
PATCHES: list[str] = []


def prepare(*, stand_ins: bool) -> None:
    """Nothing to stand in for."""


def settings(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """A mask is passed whole."""
    return [{}]


def attend(call: Call) -> Part:
    """One call through the mode."""
    mesh = init_device_mesh("cpu", (call.ring, call.ulysses), mesh_dim_names=("ring", "ulysses"))
    row, layout = call.row, None
    if row.text:
        text = Segment("text", row.text, replicated=row.text_whole)
        layout = SequenceLayout((text, Segment("image", row.S - row.text)), mesh.size())
    with UnifiedAttnMode(mesh, layout=layout) as cp:

        def cut(x: Tensor) -> Tensor:
            return cp.shard(x, dim=2, sequence=cp.sequence(x.shape[2]))

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=row.is_causal, enable_gqa=row.H_kv is not None
            )

        with torch.no_grad():
            leaves, positions = call.tokens(cut), call.positions(cut)
        leaves = [x.requires_grad_(row.backward) for x in leaves]
        out = call.compiled(run)(*leaves, call.mask(*positions))
        return call.finish(out, leaves, *positions)
