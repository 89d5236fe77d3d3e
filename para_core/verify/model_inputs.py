"""The arguments of a model call, which can be copied, and shortened along their token dims."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.torch_internals import crop_block_mask, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model call: ``args`` by position and ``kwargs`` by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> list[Any]:
        return tree_flatten((self.args, dict(self.kwargs)))[0]

    def with_leaves(self, change: Callable[[int, Any], Any]) -> ModelInputs:
        """Return new inputs in which each leaf (a tensor or other value in nested containers) is replaced by
        ``change(index, leaf)``.
        """
        leaves, spec = tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = tree_unflatten([change(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return ModelInputs(args, kwargs)

    def copied(self) -> ModelInputs:
        """Return new inputs with a copy of every leaf, because a model may change its inputs in place."""
        return self.with_leaves(lambda _, leaf: _copied(leaf))

    def shortened(self, dims: Mapping[int, int], total: int, length: int, *, only_tokens: bool) -> ModelInputs:
        """Return new inputs with only the first ``length`` of their ``total`` tokens.

        Args:
            dims: The token dim of each sharded tensor, by its index in :meth:`leaves`. Other tensors are shortened
                along all dims of size ``total``, such as the rows and columns of a mask.
            total: Number of tokens in these inputs.
            length: Number of tokens in the result.
            only_tokens: Whether to shorten sharded tensors along their token dim only, which is right if another dim of
                size ``total`` holds channels. If False, they are shortened along every dim of size ``total``, which is
                right for a mask with sharded rows.
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
    except Exception:
        # deepcopy may raise any exception. Pass on an object that cannot be copied: an ordinary call passes the object
        # itself, too.
        return leaf
