"""The arguments of ``check_parallel``: validate them, and copy and shorten the inputs of the model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from para_core.instance_patching import is_wrapped, original_class, uncompiled
from para_core.plans.plan import Plan, Split
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

        def copied(_: int, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.detach().clone()
            try:
                return copy.deepcopy(leaf)
            except Exception:
                # deepcopy may raise any exception. Pass on an object that cannot be copied, as an ordinary call does.
                return leaf

        return self.with_leaves(copied)

    def shortened(self, dims: Mapping[int, int], total: int, length: int, *, only_tokens: bool) -> ModelInputs:
        """Return new inputs with only the first ``length`` of their ``total`` tokens.

        Args:
            dims: The token dim of each sharded tensor, by its index in :meth:`leaves`. Other tensors are shortened
                along all dims of size ``total``, such as the rows and columns of a mask.
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


def checked_module(model: Any) -> nn.Module:
    module = uncompiled(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module (of a pipeline, its transformer).")
    if any(is_wrapped(submodule, "parallel") for submodule in module.modules()):
        raise ValueError(
            f"{original_class(module).__name__} is already parallel. Check the unmodified model, or undo it first: "
            "unparallelize_pipe(pipe), unparallelize_transformer(transformer), remove_context_parallel(model)."
        )
    return module


def checked_ranks(ranks: int | Sequence[int]) -> list[int]:
    numbers = [ranks] if isinstance(ranks, int) else [*ranks]
    if not numbers or any(not isinstance(number, int) or number < 2 for number in numbers):
        raise ValueError(f"ranks is {ranks!r}; expected a number of ranks, at least 2, or several such numbers.")
    return numbers


def dims_of_tokens(module: nn.Module, inputs: ModelInputs, dim: int | Mapping[str, int] | None) -> dict[int, int]:
    """Return the token dim of each tensor that is to be sharded, keyed by its index in ``inputs.leaves()``.

    ``dim`` is the dim of the tokens, or a dim for each parameter name. None means dim 1.

    Raises:
        TypeError: ``dim`` has the wrong type.
        ValueError: ``dim`` names an unknown argument or is out of range, or no input is a tensor with this dim.
    """
    leaves = inputs.leaves()
    if isinstance(dim, Mapping):
        named = _named_leaves(module, inputs)
        unknown = [name for name in dim if name not in named]
        if unknown:
            raise ValueError(f"dim names {unknown}, which are not among the given arguments {sorted(named)}.")
        dims = {index: dim[name] for name in dim for index in named[name] if isinstance(leaves[index], Tensor)}
        bad = [list(leaves[i].shape) for i, d in dims.items() if not -leaves[i].ndim <= d < leaves[i].ndim]
        if bad or not dims:
            raise ValueError(
                f"dim is {dict(dim)}; expected the dim of the tokens of tensors, got shapes {bad or 'none'}."
            )
        return {i: d % leaves[i].ndim for i, d in dims.items()}
    dim = 1 if dim is None else dim
    if not isinstance(dim, int):
        raise TypeError(f"dim is a {type(dim).__name__}; expected an int, or a dict of parameter names to ints.")
    tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and -x.ndim <= dim < x.ndim}
    if not tensors:
        raise ValueError(f"none of the inputs is a tensor with a dim {dim}; say with dim= where the tokens are.")
    total = next(iter(tensors.values())).shape[dim]
    return {i: dim % x.ndim for i, x in tensors.items() if x.shape[dim] == total}


def dims_of_plan(module: nn.Module, inputs: ModelInputs, plan: Plan) -> dict[int, int]:
    """Return the token dim of each tensor that ``plan`` splits, keyed by its index in ``inputs.leaves()``.

    Tensors with the tokens of a segment come before tensors that only accompany tokens, such as positions, because the
    first entry gives the length of the sequence. Empty if the plan splits no argument of the model.
    """
    leaves, named = inputs.leaves(), _named_leaves(module, inputs)
    splits = {name: cut for name, cut in plan.inputs.items() if isinstance(cut, Split) and name in named}
    order = sorted(splits, key=lambda name: splits[name].segment is None)
    return {
        index: splits[name].dim % leaves[index].ndim
        for name in order
        for index in named[name]
        if isinstance(leaves[index], Tensor) and -leaves[index].ndim <= splits[name].dim < leaves[index].ndim
    }


def _named_leaves(module: nn.Module, inputs: ModelInputs) -> dict[str, list[int]]:
    """Return, for each parameter name, the indices in ``inputs.leaves()`` of the values in its argument."""
    signature = inspect.signature(module.forward)
    bound, kinds = signature.bind_partial(*inputs.args, **inputs.kwargs).arguments, signature.parameters
    by_identity: dict[int, list[int]] = {}
    for index, leaf in enumerate(inputs.leaves()):
        by_identity.setdefault(id(leaf), []).append(index)
    named: dict[str, list[int]] = {}
    for name, value in bound.items():
        values = value if kinds[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        for argument, of_name in values.items():
            leaves = ModelInputs((of_name,), {}).leaves()
            named[argument] = [index for leaf in leaves for index in by_identity[id(leaf)]]
    return named
