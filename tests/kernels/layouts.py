"""Random numbers, and tensors of any strides as a strategy of hypothesis."""

from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


@st.composite
def laid_out(draw: Any, x: Tensor) -> Tensor:
    """Return the numbers of ``x`` in memory with another order of dims, steps and beginning. The rest holds -1."""
    order = draw(st.permutations(range(x.ndim)))
    steps = [draw(st.integers(1, 2)) for _ in x.shape]
    starts = [draw(st.integers(0, 1)) for _ in x.shape]
    sizes = [size * step + start for size, step, start in zip(x.shape, steps, starts, strict=True)]
    memory = torch.full([sizes[dim] for dim in order], -1, dtype=x.dtype)
    memory = memory.permute([order.index(dim) for dim in range(x.ndim)])
    part = [slice(start, start + size * step, step) for size, step, start in zip(x.shape, steps, starts, strict=True)]
    return memory[tuple(part)].copy_(x)
