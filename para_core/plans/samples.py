"""Sharing the samples of a batch among the ranks of a mesh dim: what a rank is given, and what all of them gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim
from para_core.torch_internals import tree_leaves


def number_of_samples(value: Any, dim: int | None) -> int | None:
    """Return the number of samples of a tensor along ``dim``, or of a list (``dim`` None); None if ``value`` is
    neither.
    """
    if isinstance(value, Tensor) and dim is not None:
        return value.shape[dim]
    if isinstance(value, (tuple, list)) and dim is None:
        shapes = [[x.shape for x in tree_leaves(entry) if isinstance(x, Tensor)] for entry in value]
        return len(value) if all(shape == shapes[0] for shape in shapes) else None
    return None


def own_samples(value: Any, dim: int | None, total: int, batch: MeshDim) -> Any:
    """Return this rank's part of ``total`` samples, of a tensor or of each one in a dict or list. Others are returned
    whole.

    Args:
        dim: None: ``value`` is a list with an entry for each sample.
    """
    if dim is None:
        if not isinstance(value, (tuple, list)) or len(value) != total:
            return value
        size = total // batch.size
        return value[batch.index * size : (batch.index + 1) * size]
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
    """``output``, a tensor, a tuple or list, or a ModelOutput, with the samples of all ranks, of which each has as
    many.

    A list of tensors in it has one for each sample, all of one shape.
    """

    def gather(value: Any) -> Any:
        if isinstance(value, list):
            return list(all_gather(torch.stack(value), [samples] * batch.size, 0, batch).unbind())
        return all_gather(value, [samples] * batch.size, 0, batch) if isinstance(value, Tensor) else value

    if isinstance(output, (Tensor, list)):
        return gather(output)
    if isinstance(output, tuple):
        return tuple(gather(value) for value in output)
    for key, value in list(output.items()):
        output[key] = gather(value)
    return output
