"""The errors of a block mask that was not sharded, or was sharded as another sequence, in eager code and in graphs.

:mod:`.flex_attention` raises them. Tests: ``MISUSES`` of tests/modes/test_flex_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from para_core.distributed.collectives import LIBRARY, define_operator

NOT_SHARDED = (
    "block_mask is over {0} queries and {1} keys, and was not sharded; the sequence has {2} and {3} tokens, of which "
    "each rank holds a part. Make the mask over all tokens, create_block_mask(..., Q_LEN={2}, KV_LEN={3}), and pass "
    "cp.shard(block_mask)."
)
OTHER_SEQUENCE = (
    "block_mask was sharded as another sequence than this call's {0} queries and {1} keys, or by another layout. Shard "
    "it after the tokens that it is for, or say which these are: cp.shard(block_mask, sequence=cp.sequence(total))."
)


def raise_in_graph(
    query: Tensor, value: Tensor, message: str, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Add an operator to the traced graph that raises ``ValueError(message.format(*numbers))`` when the graph
    runs. Dynamo would replace an error that is raised while it traces. Return uninitialized results.
    """
    out = torch.ops.para_core.raise_flex_attention(query, value, message, numbers)
    stat = query.new_empty(query.shape[:3], dtype=torch.float32)
    return out, stat, stat


def _raise(query: Tensor, value: Tensor, message: str, numbers: list[int]) -> Tensor:
    raise ValueError(message.format(*numbers))


define_operator("raise_flex_attention(Tensor query, Tensor value, str message, SymInt[] numbers) -> Tensor")
LIBRARY.impl("raise_flex_attention", _raise, "CompositeExplicitAutograd")
torch.library.register_fake(
    "para_core::raise_flex_attention",
    lambda query, value, *_: query.new_empty(*query.shape[:3], value.shape[3]),
    lib=LIBRARY,
)
