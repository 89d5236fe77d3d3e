"""Replace weights that are not on this rank by zeros, so that code can run that reads only their shapes, dtypes and
device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.torch_internals import buffer_slots, parameter_slots
from para_core.weights.subclasses import map_plain_tensors, plain_tensors

# The dicts of parameters or buffers that hold a weight, each with the name of the weight in that dict.
Owners = list[tuple[dict[str, Any], str]]


def weights_of(module: nn.Module) -> list[tuple[Tensor, Owners]]:
    """Return the parameters and buffers of ``module`` in the same order on every rank, each with the dicts that hold
    it.

    A weight that several modules share occurs once.
    """
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
    """Replace ``weights`` by zeros on ``device`` inside the ``with`` block.

    On exit, each weight is restored, unless its zeros were replaced by another tensor, or are ``writable`` and were
    written to.

    Args:
        weights: Weights with the dicts that hold them, from :func:`weights_of`.
        device: Device of the zeros.
        writable: The ``id()`` of weights whose zeros may be written to. Other zeros are expanded scalars, which take no
            memory.
    """

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)

    placed = []
    for weight, owners in weights:
        plain = torch.zeros(weight.shape, dtype=weight.dtype, device="meta") if isinstance(weight, DTensor) else weight
        held = map_plain_tensors(zeros, plain.detach())
        held = map_plain_tensors(torch.clone, held) if id(weight) in writable else held
        held = nn.Parameter(held, requires_grad=False) if isinstance(weight, nn.Parameter) else held
        placed.append((held, weight, owners))
        put_weight(owners, held)
    try:
        yield
    finally:
        for held, weight, owners in placed:
            written = id(weight) in writable and any(bool(x.any()) for x in plain_tensors(held))
            for tensors, name in owners:
                if tensors.get(name) is held and not written:
                    tensors[name] = weight
