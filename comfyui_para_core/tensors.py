"""Tensors in the arguments and outputs that go between ComfyUI's process and the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.torch_internals import pytree


def move_tensors(value: Any, device: torch.device | None) -> Any:
    """Return ``value`` with the tensors in nested lists, tuples and dicts on ``device``; None moves none."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), value)


def first_device(value: Any) -> torch.device | None:
    """Return the device of the first tensor in nested lists, tuples and dicts; None if there is none."""
    return next((x.device for x in pytree.tree_leaves(value) if isinstance(x, Tensor)), None)
