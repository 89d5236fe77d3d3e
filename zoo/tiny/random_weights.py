"""Random parameters that are the same in every process, and none of them zero."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def fill(module: Module, seed: int) -> Module:
    """Set random values, which keep activations near 1, in every parameter. Returns ``module`` in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))
            else:
                # The scale of a norm, or a bias.
                parameter.copy_(0.2 * noise + (1.0 if name.endswith(("weight", "gamma")) else 0.0))
    return module.eval().requires_grad_(False)
