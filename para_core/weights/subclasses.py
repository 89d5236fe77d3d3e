"""Tensors that consist of others, as quantized weights do (``__tensor_flatten__``): the plain ones inside, and the same
put together anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def consists_of_tensors(x: Tensor) -> bool:
    """Whether ``x`` holds its values in other tensors, and says in which ones. A DTensor counts as plain."""
    return hasattr(type(x), "__tensor_flatten__") and not isinstance(x, DTensor)


def plain_tensors(x: Tensor) -> list[Tensor]:
    """``x`` itself, or the plain tensors that it consists of, in a fixed order."""
    if not consists_of_tensors(x):
        return [x]
    names, _ = _flattened(x)
    return [inner for name in names for inner in plain_tensors(getattr(x, name))]


def map_plain_tensors(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``change(x)``, or, of a tensor that consists of others, one of the same kind that consists of what ``change``
    makes of these.
    """
    if not consists_of_tensors(x):
        return change(x)
    names, context = _flattened(x)
    inner = {name: map_plain_tensors(change, getattr(x, name)) for name in names}
    kind: Any = type(x)
    made: Tensor = kind.__tensor_unflatten__(inner, context, x.shape, x.stride())
    return made


def _flattened(x: Any) -> tuple[list[str], Any]:
    names, context = x.__tensor_flatten__()
    return names, context


def is_plain_weight(x: Tensor) -> bool:
    """Whether ``x`` is a parameter or a tensor of PyTorch's own, and no subclass of it."""
    return type(x) in (Tensor, nn.Parameter)
