"""The arguments of a model call, and where their tokens are.

``check_parallel`` and ``verify=True`` hold the inputs of a call by these. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from para_core.dataclass_fields import by_path, leaves_of, map_leaves
from para_core.plans.plan import Plan, Split
from para_core.torch_internals import crop_block_mask


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a model call: ``args`` by position and ``kwargs`` by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> list[Any]:
        """Return the tensors and other values in nested containers, in order."""
        return leaves_of((self.args, dict(self.kwargs)))

    def change_leaves(self, change: Callable[[int, Any], Any]) -> ModelInputs:
        """Return new inputs in which each leaf is replaced by ``change(index, leaf)``."""
        indices = count()
        arguments = (self.args, dict(self.kwargs))
        args, kwargs = map_leaves(lambda leaf: change(next(indices), leaf), arguments)
        return ModelInputs(args, kwargs)

    def copy(self) -> ModelInputs:
        """Return new inputs with a copy of every leaf, because a model may change its inputs in place."""

        def copy_leaf(_: int, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.detach().clone()
            try:
                return copy.deepcopy(leaf)
            except Exception:
                # deepcopy may raise any exception. Pass on an object that cannot be copied, as a call does.
                return leaf

        return self.change_leaves(copy_leaf)

    def shorten(self, dims: Mapping[int, int], total: int, length: int, *, only_tokens: bool) -> ModelInputs:
        """Return new inputs with only the first ``length`` of their ``total`` tokens.

        Args:
            dims: The token dim of each sharded tensor, by its index in :meth:`leaves`. Other tensors are
                shortened along all dims of size ``total``, such as the rows and columns of a mask.
            total: Number of tokens.
            length: Number of tokens to keep.
            only_tokens: Whether to shorten sharded tensors along their token dim only, which is right if
                another dim of size ``total`` holds channels. If False, they are shortened along every dim of
                size ``total``, which is right for a mask with sharded rows.
        """

        def shorten_leaf(index: int, leaf: Any) -> Any:
            if isinstance(leaf, BlockMask):
                return _shorten_block_mask(leaf, total, length)
            if not isinstance(leaf, Tensor):
                return leaf
            if index in dims and only_tokens:
                return _shorten_tensor(leaf, [dims[index]], total, length)
            return _shorten_tensor(leaf, range(leaf.ndim), total, length)

        return self.change_leaves(shorten_leaf)


def _shorten_block_mask(mask: BlockMask, total: int, length: int) -> BlockMask:
    """Return ``mask`` with ``length`` queries, and keys, if it had ``total`` of them; else unchanged."""
    queries, keys = mask.seq_lengths
    if total not in (queries, keys):
        return mask
    if queries == total:
        queries = length
    if keys == total:
        keys = length
    return crop_block_mask(mask, queries, keys)


def _shorten_tensor(x: Tensor, dims: Sequence[int], total: int, length: int) -> Tensor:
    """Return the first ``length`` entries of ``x`` along those of ``dims`` that have ``total`` entries."""
    for dim in dims:
        if x.shape[dim] == total:
            x = x.narrow(dim, 0, length)
    return x


def dims_of_tokens(
    module: nn.Module, inputs: ModelInputs, dim: int | Mapping[str, int] | None
) -> dict[int, int]:
    """Return the token dim of each tensor that is to be sharded, keyed by its index in ``inputs.leaves()``.

    ``dim`` is the dim of the tokens, or a dim for each parameter name. None means dim 1.

    Raises:
        TypeError: ``dim`` has the wrong type.
        ValueError: ``dim`` names an unknown argument or is out of range, or no input is a tensor with this
            dim.
    """
    if isinstance(dim, Mapping):
        return _dims_by_name(module, inputs, dim)
    if dim is None:
        dim = 1
    if not isinstance(dim, int):
        raise TypeError(
            f"dim is a {type(dim).__name__}; expected an int, or a dict of parameter names to ints."
        )
    leaves = enumerate(inputs.leaves())
    tensors = {i: x for i, x in leaves if isinstance(x, Tensor) and -x.ndim <= dim < x.ndim}
    if not tensors:
        raise ValueError(
            f"none of the inputs is a tensor with a dim {dim}; say with dim= where the tokens are."
        )
    total = next(iter(tensors.values())).shape[dim]
    return {i: dim % x.ndim for i, x in tensors.items() if x.shape[dim] == total}


def _dims_by_name(module: nn.Module, inputs: ModelInputs, dims: Mapping[str, int]) -> dict[int, int]:
    """Return what :func:`dims_of_tokens` returns for a dim for each parameter name. Raise as it does."""
    if not all(isinstance(dim, int) for dim in dims.values()):
        raise TypeError(f"dim is {dict(dims)}; expected an int for each parameter name.")
    leaves, indices = inputs.leaves(), _indices_by_name(module, inputs)
    unknown = [name for name in dims if name not in indices]
    if unknown:
        raise ValueError(f"dim names {unknown}, which are not among the given arguments {sorted(indices)}.")
    by_index = {i: dims[name] for name in dims for i in indices[name] if isinstance(leaves[i], Tensor)}
    bad = [
        list(leaves[i].shape) for i, dim in by_index.items() if not -leaves[i].ndim <= dim < leaves[i].ndim
    ]
    if bad or not by_index:
        raise ValueError(
            f"dim is {dict(dims)}; expected the dim of the tokens of tensors, got shapes {bad or 'none'}."
        )
    return {i: dim % leaves[i].ndim for i, dim in by_index.items()}


def dims_of_plan(module: nn.Module, inputs: ModelInputs, plan: Plan) -> dict[int, int]:
    """Return the token dim of each tensor that ``plan`` splits, keyed by its index in ``inputs.leaves()``.

    Tensors with the tokens of a segment come before tensors that only accompany tokens, such as positions,
    because the first entry gives the length of the sequence. Empty if the plan splits no argument of the
    model.
    """
    leaves, indices = inputs.leaves(), _indices_by_name(module, inputs)
    splits = {name: rule for name, rule in plan.inputs.items() if isinstance(rule, Split) and name in indices}
    dims: dict[int, int] = {}
    for name in sorted(splits, key=lambda name: splits[name].segment is None):
        dim = splits[name].dim
        for i in indices[name]:
            leaf = leaves[i]
            if isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim:
                dims[i] = dim % leaf.ndim
    return dims


def _indices_by_name(module: nn.Module, inputs: ModelInputs) -> dict[str, list[int]]:
    """Return, for each parameter name, the indices in ``inputs.leaves()`` of the values in its argument.

    The fields of a dataclass have entries of their own, by path, such as ``"video.x"``.
    """
    signature = inspect.signature(module.forward)
    # Bind the indices and not the leaves, because one tensor may be several arguments.
    indices = inputs.change_leaves(lambda index, _: index)
    arguments: dict[str, Any] = {}
    for name, value in signature.bind_partial(*indices.args, **indices.kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return {name: leaves_of((value,)) for name, value in {**arguments, **by_path(arguments)}.items()}
