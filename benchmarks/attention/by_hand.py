"""Ulysses and ring attention for even sizes, written by hand and in full: what the library's host cost is compared with.

No mask, no gradient, no uneven sizes, no check of anything. Tensors are ``[B, H, S_local, D]``, as SDPA takes them, of a model
that holds them as ``[B, S_local, H, D]`` in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# torch.distributed's own calls, or those that torch.compile can trace.
Calls = Literal["in place", "functional"]


def all_to_all(x: Tensor, group: ProcessGroup, calls: Calls) -> Tensor:
    """An equal part of the first dim of ``x`` to each rank."""
    if calls == "in place":
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received
    sizes = [x.shape[0] // group.size()] * group.size()
    sent = torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(sent)


def ulysses(query: Tensor, key: Tensor, value: Tensor, *, group: ProcessGroup, calls: Calls) -> Tensor:
    """All tokens of a part of the heads: one all-to-all in, one out."""
    ranks = group.size()
    batch, heads, tokens, width = query.shape
    # [rank, S_local, B, 3, H_local, D]: what arrives is in the order of the tokens, and is used as it lies.
    parts = [x.view(batch, ranks, heads // ranks, tokens, width).permute(1, 3, 0, 2, 4) for x in (query, key, value)]
    entered = all_to_all(torch.stack(parts, dim=3), group, calls)
    block = entered.view(ranks * tokens, batch, 3, heads // ranks, width).permute(2, 1, 3, 0, 4)
    out = F.scaled_dot_product_attention(*block.unbind(0))
    left = all_to_all(out.permute(2, 0, 1, 3).contiguous(), group, calls)
    left = left.view(ranks, tokens, batch, heads // ranks, width).permute(2, 1, 0, 3, 4)
    return left.reshape(batch, tokens, heads, width).contiguous().transpose(1, 2)


def shift(x: Tensor, group: ProcessGroup, calls: Calls) -> Callable[[], Tensor]:
    """Begin to send ``x`` to the next rank; what waits for that of the one before."""
    ranks, rank = group.size(), group.rank()
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    if calls == "in place":
        received = torch.empty_like(x)
        operations = [dist.P2POp(dist.isend, x, following, group), dist.P2POp(dist.irecv, received, previous, group)]
        works = dist.batch_isend_irecv(operations)

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return received

        return finish
    rows = x.shape[0]
    send, receive = ([rows if peer == one else 0 for peer in range(ranks)] for one in (following, previous))
    sent = torch.ops._c10d_functional.all_to_all_single(x, receive, send, group.group_name)
    return lambda: torch.ops._c10d_functional.wait_tensor(sent)


def ring(query: Tensor, key: Tensor, value: Tensor, *, group: ProcessGroup, calls: Calls) -> Tensor:
    """Keys and values pass from neighbour to neighbour while a block is computed; results are merged in float32. On a CPU."""
    held = torch.stack([key, value])
    out, lse = torch.empty(0), torch.empty(0)
    for step in range(group.size()):
        arriving = shift(held, group, calls) if step + 1 < group.size() else None
        block, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, held[0], held[1])
        block, block_lse = block.float(), block_lse[..., None]
        if step == 0:
            out, lse = block, block_lse
        else:
            out = out - torch.sigmoid(block_lse - lse) * (out - block)
            lse = torch.logaddexp(lse, block_lse)
        if arriving is not None:
            held = arriving()
    return out.to(query.dtype)
