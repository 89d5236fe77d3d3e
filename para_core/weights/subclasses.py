"""Access the plain tensors inside tensor subclasses that define ``__tensor_flatten__``, such as quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def consists_of_tensors(x: Tensor) -> bool:
    """Whether ``x`` is a tensor subclass with ``__tensor_flatten__``, other than a DTensor."""
    return hasattr(type(x), "__tensor_flatten__") and not isinstance(x, DTensor)


def plain_tensors(x: Tensor) -> list[Tensor]:
    """Return the plain tensors of which ``x`` consists, in a fixed order; ``[x]`` if it is plain itself."""
    if not consists_of_tensors(x):
        return [x]
    names, _ = _flattened(x)
    return [inner for name in names for inner in plain_tensors(getattr(x, name))]


def map_plain_tensors(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``change`` to the plain tensors of ``x``, and return a tensor of the same class with the results.

    If ``x`` is plain itself, return ``change(x)``.
    """
    if not consists_of_tensors(x):
        return change(x)
    names, context = _flattened(x)
    inner = {name: map_plain_tensors(change, getattr(x, name)) for name in names}
    kind: Any = type(x)
    mapped: Tensor = kind.__tensor_unflatten__(inner, context, x.shape, x.stride())
    return mapped


def _flattened(x: Any) -> tuple[list[str], Any]:
    names, context = x.__tensor_flatten__()
    return names, context


def is_plain_weight(x: Tensor) -> bool:
    """Whether the class of ``x`` is exactly ``Tensor`` or ``nn.Parameter``."""
    return type(x) in (Tensor, nn.Parameter)


def is_float8(x: Tensor) -> bool:
    """Whether ``x`` has an 8-bit floating-point dtype. False for quantized weights, which report the dtype of their
    unquantized values.
    """
    return x.is_floating_point() and x.dtype.itemsize == 1
