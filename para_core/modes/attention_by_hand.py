"""Attention written out as matmul, softmax, matmul, which no mode intercepts: how a mode notices that a model computes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.distributed.layout import Segment

_SOFTMAX = frozenset({torch.softmax, F.softmax, Tensor.softmax})


def is_softmax(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is one of torch's softmax functions."""
    try:
        return func in _SOFTMAX
    except TypeError:  # not hashable
        return False


def scores_of_own_tokens(args: Sequence[Any], kwargs: Any, segments: Sequence[Segment], rank: int, ranks: int) -> bool:
    """Whether this softmax is over scores ``[..., S_local, S_local]`` of tokens that were sharded: its last dim, of as
    many keys as queries.

    Args:
        args, kwargs: of the softmax.
        segments: what was sharded through the mode, or said to be replicated.
    """
    scores = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(scores, Tensor) or scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
        return False
    rows, columns = scores.shape[-2:]
    sharded = [segment.size(rank, ranks) for segment in segments if not segment.replicated]
    joint = sum([segment.size(rank, ranks) for segment in segments])
    return bool(sharded) and rows == columns and rows in (*sharded, joint)
