"""Shortening the inputs of a model along the dims of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.torch_internals import crop_block_mask, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model: ``args`` by position and ``kwargs`` by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> list[Any]:
        return tree_flatten((self.args, dict(self.kwargs)))[0]

    def with_leaves(self, change: Callable[[int, Any], Any]) -> Inputs:
        """Return these inputs with each leaf replaced by ``change(index, leaf)``."""
        leaves, spec = tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = tree_unflatten([change(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return Inputs(args, kwargs)

    def copied(self) -> Inputs:
        """Return copies of all tensors and objects, because a model may change its inputs."""
        return self.with_leaves(lambda _, leaf: _copied(leaf))

    def shortened(self, dims: Mapping[int, int], total: int, length: int, *, only_tokens: bool) -> Inputs:
        """Return these inputs with the first ``length`` of ``total`` tokens.

        Args:
            dims: of the leaves that are sharded, by index, the dim of their tokens. Of any other tensor all dims of
                size ``total`` are shortened, such as both of a mask.
            only_tokens: of a tensor that is sharded, shorten the dim of its tokens alone: another one of that size may
                hold channels. Without it a mask of which the rows are sharded has its columns shortened, too.
        """

        def shorten(index: int, leaf: Any) -> Any:
            if isinstance(leaf, BlockMask):
                lengths = [length if size == total else size for size in leaf.seq_lengths]
                return leaf if lengths == [*leaf.seq_lengths] else crop_block_mask(leaf, *lengths)
            if not isinstance(leaf, Tensor):
                return leaf
            one_dim = index in dims and only_tokens
            for dim in [dims[index]] if one_dim else range(leaf.ndim):
                leaf = leaf.narrow(dim, 0, length) if leaf.shape[dim] == total else leaf
            return leaf

        return self.with_leaves(shorten)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    try:
        return copy.deepcopy(leaf)
    # What cannot be copied is passed as it is.
    except Exception:
        return leaf


def lengths_to_check(total: int, ranks: int) -> tuple[int, ...]:
    """``total`` itself, and a shorter length: one that ``ranks`` do not divide if they divide it, else the next that
    they divide.

    None of fewer tokens than ranks, of which many models cannot compute an empty part.
    """
    shorter = total - 1 if total % ranks == 0 else total - total % ranks
    return (total, shorter) if shorter >= ranks else (total,)
