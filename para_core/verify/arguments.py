"""Validate the arguments of ``check_parallel``, and choose which inputs, dims and lengths it checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from para_core.instance_patching import is_wrapped, original_class, uncompiled
from para_core.plans.plan import Plan, Split
from para_core.verify.model_inputs import ModelInputs


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


def lengths_to_check(total: int, ranks: int) -> tuple[int, ...]:
    """Return the lengths to check: ``total`` and a shorter length, such that ``ranks`` divides one of the two but not
    the other.

    The shorter length is left out if it is less than ``ranks``, because many models fail on an empty part.
    """
    shorter = total - 1 if total % ranks == 0 else total - total % ranks
    return (total, shorter) if shorter >= ranks else (total,)


def dims_of_tokens(module: nn.Module, inputs: ModelInputs, dim: int | Mapping[str, int] | None) -> dict[int, int]:
    """Return the token dim of each tensor that is to be sharded, keyed by its index in ``inputs.leaves()``.

    Args:
        module: The model.
        inputs: The arguments of its call.
        dim: The dim of the tokens, or a dim for each parameter name. None means dim 1.

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

    Tensors with the tokens of a segment come before tensors that only accompany tokens, such as positions. Empty if the
    plan splits no argument of the model.
    """
    leaves, named = inputs.leaves(), _named_leaves(module, inputs)
    splits = {name: cut for name, cut in plan.inputs.items() if isinstance(cut, Split) and name in named}
    # Tensors with the tokens of a segment come first, because the first entry of the result gives the length of the
    # sequence.
    order = sorted(splits, key=lambda name: splits[name].segment is None)
    return {
        index: splits[name].dim % leaves[index].ndim
        for name in order
        for index in named[name]
        if isinstance(leaves[index], Tensor) and -leaves[index].ndim <= splits[name].dim < leaves[index].ndim
    }


def _named_leaves(module: nn.Module, inputs: ModelInputs) -> dict[str, list[int]]:
    """Return, for each parameter name, the indices in ``inputs.leaves()`` of the tensors and other values in its
    argument.
    """
    bound = inspect.signature(module.forward).bind_partial(*inputs.args, **inputs.kwargs).arguments
    kinds = inspect.signature(module.forward).parameters
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
