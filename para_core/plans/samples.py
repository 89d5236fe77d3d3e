"""Sharing the samples of a batch among the ranks of a mesh dim: what a rank is given, and what all of them gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from para_core.collectives import all_gather
from para_core.mesh import MeshDim


def own_samples(value: Any, dim: int, total: int, batch: MeshDim) -> Any:
    """Of a tensor, or each one of a dict or list, this rank's part of ``total`` samples; what has not so many is for all of them."""
    if isinstance(value, Mapping):
        return {key: own_samples(item, dim, total, batch) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([own_samples(item, dim, total, batch) for item in value])
    if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] != total:
        return value
    size = total // batch.size
    return value.narrow(dim, batch.index * size, size).clone()


def holds_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a dict or list with one in it."""
    if isinstance(value, Mapping):
        return any(holds_tensor(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(holds_tensor(item) for item in value)
    return isinstance(value, Tensor)


def all_samples(output: Any, samples: int, batch: MeshDim) -> Any:
    """``output``, a tensor, a tuple or list, or a ModelOutput, with the samples of all ranks, of which each has as many."""
    gathered = [all_gather(value, [samples] * batch.size, 0, batch) for value in _tensors_of(output)]
    return _with_tensors(output, gathered)


def _tensors_of(output: Any) -> list[Tensor]:
    """Of a tensor, a tuple or list, or a ModelOutput, the tensors."""
    values = [output] if isinstance(output, Tensor) else list(output.values() if hasattr(output, "values") else output)
    return [value for value in values if isinstance(value, Tensor)]


def _with_tensors(output: Any, tensors: list[Tensor]) -> Any:
    """``output`` with others in their place."""
    if isinstance(output, Tensor):
        return tensors[0]
    others = iter(tensors)
    if isinstance(output, (tuple, list)):
        return type(output)([next(others) if isinstance(value, Tensor) else value for value in output])
    for key, value in list(output.items()):
        if isinstance(value, Tensor):
            output[key] = next(others)
    return output
