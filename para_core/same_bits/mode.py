"""A torch function mode that computes small products of a model's call with the rows of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.same_bits.one_process import one_process_of
from para_core.same_bits.row_check import CHECKED, RowCheck
from para_core.same_bits.rows import CONVOLUTIONS, convolution, linear


class SameBits(TorchFunctionMode):
    """Inside this context, products of the current call of ``module`` have the bits of one process.

    Args:
        module: The model, which has a plan.
        check: What compares each new function and shape with one process; None to compare nothing.
    """

    def __init__(self, module: nn.Module, check: RowCheck | None) -> None:
        super().__init__()
        self._module, self._check = module, check

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self._check is not None:
            self._check.compare_splits(one_process_of(self._module), *args, **kwargs)
        if func is F.linear or func in CONVOLUTIONS or (self._check is not None and func in CHECKED):
            x = args[0] if args else kwargs.get("input")
            if isinstance(x, Tensor) and x.is_floating_point():
                return self._run(
                    func, x, args[1:], {name: y for name, y in kwargs.items() if name != "input"}
                )
        return func(*args, **kwargs)

    def _run(self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        one_process = one_process_of(self._module)
        if one_process.is_this_process:
            return func(x, *args, **kwargs)
        if func is F.linear:
            output = linear(one_process, x, *args, **kwargs)
        elif func in CONVOLUTIONS:
            output = convolution(func, one_process, x, *args, **kwargs)
        else:
            output = func(x, *args, **kwargs)
        if self._check is not None and isinstance(output, Tensor):
            self._check.compare(func, one_process, x, output, args, kwargs)
        return output
