"""BatchParallelAttnMode shards samples, and each rank computes the attention of its own."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from para_core import BatchParallelAttnMode
from tests.attention.one_device import make_qkv, relative_error

BATCHES = (1, 2, 5, 8)  # The numbers of samples leave one rank without any, are uneven, or are even.
# The dims of [B, H, S_q, S_k] that a mask has.
MASKS = {None: None, "padding": ("B", 1, 1, 11), "full": ("B", 3, 11, 11), "shared": (11, 11)}
CASES = [(B, kind, dtype) for B in BATCHES for kind in MASKS for dtype in (torch.bool, torch.float32)]


def make_mask(B, kind, dtype):
    if kind is None:
        return None
    shape = [B if size == "B" else size for size in MASKS[kind]]
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(shape, generator=generator) < 0.8
    visible[..., 0] = True
    return visible if dtype == torch.bool else torch.randn(shape, generator=generator)


def attend_in_batch():
    """Return the results of all cases by the whole mask and by its samples, and the number of collectives in calls."""
    mesh, outs, collectives = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("batch",)), [], 0
    for case in CASES:
        mask = make_mask(*case)
        for cut_mask in (False, True):
            with BatchParallelAttnMode(mesh) as cp:
                q, k, v = (cp.shard(x, dim=0) for x in make_qkv(11, 3, 8, B=case[0]))
                own = cp.shard(mask, dim=0) if cut_mask and mask is not None and mask.ndim == 4 else mask
                attend = torch.ops.aten.scaled_dot_product_attention if cut_mask else F.scaled_dot_product_attention
                with CommDebugMode() as counter:
                    out = attend(q, k, v, own)
                collectives += counter.get_total_counts()
                outs.append(cp.gather(out, dim=0))
    return outs, collectives


@pytest.mark.parametrize("world_size", [2, 3])
def test_attention_to_own_samples_sends_nothing(rank_pool, world_size):
    for outs, collectives in rank_pool.run(attend_in_batch, world_size):
        assert collectives == 0
        for index, out in enumerate(outs):
            case = CASES[index // 2]
            expected = F.scaled_dot_product_attention(*make_qkv(11, 3, 8, B=case[0]), make_mask(*case))
            assert relative_error(out, expected) < 1e-5, case


def call_wrongly():
    def attend(function=F.scaled_dot_product_attention, **options):
        with BatchParallelAttnMode(dist.group.WORLD) as cp:
            function(*[cp.shard(x, dim=0) for x in make_qkv(11, 3, 8, B=5)], **options)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    for pattern, call in {
        r"attn_mask \[7, 1, 1, 11\] .*7 .* 1, [23] .* 5 ": lambda: attend(attn_mask=torch.ones(7, 1, 1, 11).bool()),
        r"dropout_p=0\.1 ": lambda: attend(dropout_p=0.1),
        r"dropout_p=0\.2 ": lambda: attend(torch.nn.MultiheadAttention(8, 2, dropout=0.2)),
        r"\('ulysses',\).* 'batch'": lambda: BatchParallelAttnMode(mesh),
    }.items():
        with pytest.raises(ValueError, match=pattern):
            call()


def test_what_does_not_fit_is_an_error(rank_pool):
    rank_pool.run(call_wrongly, 2)
