"""Weights of a module, for all features that shard, offload or quantize them: find them, look inside
quantized ones, replace them, and stand in for them while code reads their shapes only.

Nothing is sharded here: see :mod:`.fsdp`, :mod:`.tensor` and :mod:`.stages`. Most callers are in
``adapters/weights/``. Tests: tests/weights/test_quantized_files.py, tests/weights/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from para_core.torch_internals import buffer_slots, parameter_slots

# Parameters outside of the blocks with fewer elements than this stay on every rank. Such small parameters are
# not worth a collective, and pipelines read some of them directly, such as the last norm of CLIP. The planner
# counts with the same number.
FEWEST_SHARDED_ELEMENTS = 2**20
# The dicts of parameters or buffers that hold a weight, each with the name of the weight in that dict.
Owners = list[tuple[dict[str, Any], str]]


def consists_of_tensors(x: Tensor) -> bool:
    """Whether ``x`` is a tensor subclass with ``__tensor_flatten__``, other than a DTensor."""
    return hasattr(type(x), "__tensor_flatten__") and not isinstance(x, DTensor)


def plain_tensors(x: Tensor) -> list[Tensor]:
    """Return the tensors inside ``x`` that consist of no others, in a fixed order; ``[x]`` for one, or a DTensor."""
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
    """Whether the dtype of ``x`` is an 8-bit float.

    False for quantized weights, whose dtype is the unquantized one.
    """
    return x.is_floating_point() and x.dtype.itemsize == 1


def weights_of(module: nn.Module) -> list[tuple[Tensor, Owners]]:
    """Return the parameters and buffers of ``module``, in one order on all ranks, and the dicts that hold
    each.
    """
    weights: dict[int, tuple[Tensor, Owners]] = {}
    for owner in module.modules():
        for tensors in (parameter_slots(owner), buffer_slots(owner)):
            for name, x in tensors.items():
                if x is not None:
                    weights.setdefault(id(x), (x, []))[1].append((tensors, name))
    return list(weights.values())


def put_weight(owners: Owners, x: Tensor) -> None:
    """Replace a weight by ``x`` in all dicts that hold it."""
    for tensors, name in owners:
        tensors[name] = x


def write_shard(sharded: DTensor, full: Tensor) -> None:
    """Copy this rank's shard of ``full`` into ``sharded``.

    No communication: ``full`` must be equal on all ranks.
    """
    with torch.no_grad():
        distributed = distribute_tensor(
            full.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None
        )
        sharded.to_local().copy_(distributed.to_local())


@contextmanager
def stand_ins(
    weights: Iterable[tuple[Tensor, Owners]], device: torch.device, writable: Collection[int] = ()
) -> Iterator[None]:
    """Replace ``weights``, from :func:`weights_of`, by zeros on ``device`` inside the ``with`` block.

    Use it for code that reads only shapes, dtypes and devices of the weights. On exit, each weight is
    restored, unless its zeros were replaced by another tensor, or were written to. ``writable`` are the
    ``id()`` of weights whose stand-ins may be written to: if they are floats, these hold NaN, so that written
    zeros are seen; zeros written to integers and 8-bit floats are not. Other zeros are expanded scalars,
    which take no memory.
    """

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)

    def make_writable(x: Tensor) -> Tensor:
        if _can_be_nan(x):
            return torch.full_like(x, torch.nan)
        return x.clone()

    def is_written(x: Tensor) -> bool:
        if _can_be_nan(x):
            return not bool(x.isnan().all())
        return bool(x.any())

    placed = []
    # Restore what was replaced also if memory for a later stand-in is lacking.
    try:
        for weight, owners in weights:
            plain = weight.detach()
            if isinstance(weight, DTensor):
                plain = torch.zeros(weight.shape, dtype=weight.dtype, device="meta")
            stand_in = map_plain_tensors(zeros, plain)
            if id(weight) in writable:
                stand_in = map_plain_tensors(make_writable, stand_in)
            if isinstance(weight, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=False)
            placed.append((stand_in, weight, owners))
            put_weight(owners, stand_in)
        yield
    finally:
        for stand_in, weight, owners in placed:
            written = id(weight) in writable and any(map(is_written, plain_tensors(stand_in)))
            for tensors, name in owners:
                if tensors.get(name) is stand_in and not written:
                    tensors[name] = weight


def _can_be_nan(x: Tensor) -> bool:
    return x.is_floating_point() and not is_float8(x)
