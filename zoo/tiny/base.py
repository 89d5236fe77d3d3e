"""What a tiny transformer is: its class, its sizes, and random inputs for one call of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from zoo.tiny.random_weights import fill


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def valid(lengths: tuple[int, ...], total: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A mask ``[B, total]`` of text of so many tokens."""
    return torch.tensor([[i < length for i in range(total)] for length in lengths]).to(dtype)


@dataclass(frozen=True)
class TinyModel:
    """``inputs(frames, height, width)``, in latent pixels."""

    cls: str
    inputs: Callable[..., dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 1) -> nn.Module:
        return fill(getattr(diffusers, self.cls)(**self.config), seed)
