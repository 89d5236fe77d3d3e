"""Detect attention that a model computes by hand, as matmul, softmax, matmul.

Modes cannot run such attention over a mesh. They raise an error or warn when they are left.
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
    """Whether ``func`` is ``torch.softmax``, ``F.softmax`` or ``Tensor.softmax``."""
    try:
        return func in _SOFTMAX
    except TypeError:  # Some callables are not hashable.
        return False


def scores_of_own_tokens(args: Sequence[Any], kwargs: Any, segments: Sequence[Segment], rank: int, ranks: int) -> bool:
    """Whether a softmax call seems to compute attention weights ``[..., S_local, S_local]`` over this rank's tokens.

    Return True if the softmax is over the last dim of a tensor with at least 3 dims, and the last two dims both have
    length ``S_local``: the number of tokens that this rank holds of one sharded segment, or of all segments.

    Args:
        args: The positional arguments of the softmax call.
        kwargs: The keyword arguments of the softmax call.
        segments: The segments that were sharded through the mode or declared replicated. Without a sharded segment the
            result is False.
        rank, ranks: The index of this rank, and the number of ranks that share the segments.
    """
    scores = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(scores, Tensor) or scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
        return False
    rows, columns = scores.shape[-2:]
    sharded = [segment.size(rank, ranks) for segment in segments if not segment.replicated]
    joint = sum([segment.size(rank, ranks) for segment in segments])
    return bool(sharded) and rows == columns and rows in (*sharded, joint)
