"""Find functions whose bits depend on the number of rows, at the first call with each shape.

A rank's tensor is put at its place in zeros of the sizes of one process, the same function computes both, and the bytes
of the rank's part are compared. That needs no second run of the model and no exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from para_core.same_bits.one_process import OneProcess, put, resize, take
from para_core.same_bits.rows import CONVOLUTIONS

# Functions of one tensor with tokens, whose rows do not depend on each other.
CHECKED: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        *CONVOLUTIONS,
        F.layer_norm,
        F.rms_norm,
        F.silu,
        F.gelu,
        F.relu,
        torch.sigmoid,
        torch.tanh,
        torch.rsqrt,
        torch.exp,
        torch.sin,
        torch.cos,
        Tensor.sigmoid,
        Tensor.tanh,
        Tensor.rsqrt,
        Tensor.exp,
    }
)


@dataclass(frozen=True)
class Finding:
    """A function whose result for a rank's rows has other bits than in one process.

    Args:
        module: The name of the module that called it; empty if none did.
        function: The name of the function.
        shape: The shape of the rank's tensor.
        one_process: The shape of that tensor in one process.
        dtype: The type of the tensor.
    """

    module: str
    function: str
    shape: tuple[int, ...]
    one_process: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        place = f"{self.module}, " if self.module else ""
        shape, whole = (" × ".join(map(str, sizes)) for sizes in (self.shape, self.one_process))
        return f"{place}{self.function} of {shape} in {self.dtype}: differs from {whole} in one process"


@dataclass(eq=False)
class RowCheck:
    """Compares each new function, shape and type with what one process would compute.

    Args:
        module: The model, whose submodules findings name.
        findings: What differed so far.
    """

    module: nn.Module
    findings: list[Finding] = field(default_factory=list)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def compare(
        self,
        func: Callable[..., Any],
        one: OneProcess,
        x: Tensor,
        output: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Note a finding if ``func`` gives other bits for ``x``, whose ``output`` is given, inside one process."""
        key = (func, x.shape, x.stride(), x.dtype, *[y.shape for y in args if isinstance(y, Tensor)])
        if key in self._seen:
            return
        self._seen.add(key)
        tokens = None if func in CONVOLUTIONS else one.place_of_tokens(x)
        samples = one.batch_size > 1 and (tokens is None or tokens[0] > 0)
        if tokens is None and not samples:
            return
        sizes = list(x.shape)
        if tokens is not None:
            sizes[tokens[0]] = tokens[1].total
        if samples:
            sizes[0] *= one.batch_size
        whole = resize(x, sizes)
        put(x, whole, one, tokens, samples)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            expected = take(func(whole, *args, **kwargs), one, tokens, samples)
        if expected.shape != output.shape or not have_equal_bytes(expected, output):
            name = getattr(func, "__name__", str(func))
            where = _calling_module(self.module)
            dtype = str(x.dtype).removeprefix("torch.")
            self.findings.append(Finding(where, name, tuple(x.shape), tuple(sizes), dtype))


def have_equal_bytes(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one shape have the same type and bytes."""
    # A copy, because a contiguous tensor whose last dim has one element may have any stride there.
    if x.dtype != y.dtype:
        return False
    copies = [z.clone(memory_format=torch.contiguous_format).view(torch.uint8) for z in (x, y)]
    return torch.equal(*copies)


def _calling_module(model: nn.Module) -> str:
    """Return the name of the innermost submodule of ``model`` whose method is running; empty if there is none."""
    names = {id(module): name for name, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str | None = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return ""
