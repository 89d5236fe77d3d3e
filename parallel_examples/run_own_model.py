"""Run a transformer of your own on several ranks, and compare the result with that of one rank.

torchrun --nproc_per_node=4 parallel_examples/run_own_model.py
"""

import torch
import torch.distributed as dist
from torch import nn

from para_core import UnifiedAttnMode, init_context_parallel_mesh

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
# The number of tokens, 101, need not be divisible by the number of ranks.
x = torch.randn(1, 101, 64)

with torch.no_grad():
    expected = model(x)
    for max_ring_dim_size in (4, 2, 1):
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=max_ring_dim_size)
        with UnifiedAttnMode(mesh) as cp:
            y = cp.gather(model(cp.shard(x, dim=1)), dim=1)
        if dist.get_rank() == 0:
            error = (y - expected).norm() / expected.norm()
            print(
                f"ring {mesh['ring'].size()} × ulysses {mesh['ulysses'].size()}: relative difference {error:.1e}"
            )
dist.destroy_process_group()
