"""The weights of a module: the tensors inside quantized ones, their gradients, and zeros in place of missing ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.torch_internals import buffer_slots, parameter_slots

# The dicts of parameters or buffers that hold a weight, each with the name of the weight in that dict.
Owners = list[tuple[dict[str, Any], str]]


def consists_of_tensors(x: Tensor) -> bool:
    """Whether ``x`` is a tensor subclass with ``__tensor_flatten__``, other than a DTensor."""
    return hasattr(type(x), "__tensor_flatten__") and not isinstance(x, DTensor)


def plain_tensors(x: Tensor) -> list[Tensor]:
    """Return the plain tensors inside ``x``, in a fixed order; ``[x]`` if it is plain itself."""
    if not consists_of_tensors(x):
        return [x]
    names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
    return [inner for name in names for inner in plain_tensors(getattr(x, name))]


def map_plain_tensors(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a tensor like ``x``, with ``change`` applied to each of the plain tensors inside it."""
    if not consists_of_tensors(x):
        return change(x)
    kind: Any = type(x)
    names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: map_plain_tensors(change, getattr(x, name)) for name in names}
    mapped: Tensor = kind.__tensor_unflatten__(inner, context, x.shape, x.stride())
    return mapped


def is_plain_weight(x: Tensor) -> bool:
    """Whether the class of ``x`` is exactly ``Tensor`` or ``nn.Parameter``."""
    return type(x) in (Tensor, nn.Parameter)


def is_float8(x: Tensor) -> bool:
    """Whether the dtype of ``x`` is an 8-bit float. False for quantized weights, whose dtype is the unquantized one."""
    return x.is_floating_point() and x.dtype.itemsize == 1


def weights_of(module: nn.Module) -> list[tuple[Tensor, Owners]]:
    """Return the parameters and buffers of ``module``, in one order on all ranks, and the dicts that hold each."""
    held: dict[int, tuple[Tensor, Owners]] = {}
    for owner in module.modules():
        for tensors in (parameter_slots(owner), buffer_slots(owner)):
            for name, x in tensors.items():
                if x is not None:
                    held.setdefault(id(x), (x, []))[1].append((tensors, name))
    return list(held.values())


def put_weight(owners: Owners, x: Tensor) -> None:
    """Replace a weight by ``x`` in all dicts that hold it."""
    for tensors, name in owners:
        tensors[name] = x


@contextmanager
def stand_ins(
    weights: Iterable[tuple[Tensor, Owners]], device: torch.device, writable: Collection[int] = ()
) -> Iterator[None]:
    """Replace ``weights``, from :func:`weights_of`, by zeros on ``device`` inside the ``with`` block.

    Use it for code that reads only shapes, dtypes and devices of the weights. On exit, each weight is restored, unless
    its zeros were replaced by another tensor, or were written to. ``writable`` are the ``id()`` of weights whose
    stand-ins may be written to: if they are floats, these hold NaN, so that written zeros are seen. Other zeros are
    expanded scalars, which take no memory.
    """

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)

    def unwritten(x: Tensor) -> Tensor:
        return torch.full_like(x, torch.nan) if _has_nan(x) else x.clone()

    def is_written(x: Tensor) -> bool:
        return not bool(x.isnan().all()) if _has_nan(x) else bool(x.any())

    placed = []
    for weight, owners in weights:
        plain = torch.zeros(weight.shape, dtype=weight.dtype, device="meta") if isinstance(weight, DTensor) else weight
        held = map_plain_tensors(zeros, plain.detach())
        held = map_plain_tensors(unwritten, held) if id(weight) in writable else held
        held = nn.Parameter(held, requires_grad=False) if isinstance(weight, nn.Parameter) else held
        placed.append((held, weight, owners))
        put_weight(owners, held)
    try:
        yield
    finally:
        for held, weight, owners in placed:
            written = id(weight) in writable and any(map(is_written, plain_tensors(held)))
            for tensors, name in owners:
                if tensors.get(name) is held and not written:
                    tensors[name] = weight


def _has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and not is_float8(x)


# Name of the attribute of a module with sharded weights that holds its Gradients.
GRADIENTS = "_para_core_gradients"


def forget_gradients(module: nn.Module) -> None:
    """Drop the record in ``module``, so that gathering its sharded weights does not turn ``requires_grad`` on again."""
    if GRADIENTS in module.__dict__:
        module.__dict__[GRADIENTS].forget()


class Gradients:
    """A record of the parameters of a model whose ``requires_grad`` was turned off, to turn it on again.

    A parameter is identified by module and name, because sharding replaces the object. ``requires_grad`` of a parameter
    that the user replaced by one of another class, such as a quantized weight, does not change.
    """

    def __init__(self) -> None:
        self._enabled: dict[tuple[int, str], tuple[nn.Module, str, type]] = {}

    def stop(self, module: nn.Module) -> None:
        """Turn ``requires_grad`` off for all parameters of ``module``, and record those for which it was on.

        Call it again if the module gets new parameters: they are added to the record.
        """
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._enabled[id(owner), name] = (owner, name, type(parameter))
        module.requires_grad_(False)

    def restore(self) -> None:
        """Turn gradients on again for the parameters for which :meth:`stop` turned them off."""
        for owner, name, kind in self._enabled.values():
            parameter: nn.Parameter | None = parameter_slots(owner).get(name)
            if parameter is not None and type(parameter) is kind:
                parameter.requires_grad_(True)
        self.forget()

    def forget(self) -> None:
        """Drop the record, so that :meth:`restore` leaves gradients off.

        Call this after peft adds an adapter and freezes all other parameters, which the record does not show.
        """
        self._enabled.clear()
