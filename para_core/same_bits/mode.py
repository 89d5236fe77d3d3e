"""A torch function mode that computes small products of a model's call with the rows of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.same_bits.found import Found, kind_of
from para_core.same_bits.one_process import OneProcess, Tokens, compute_at_place, one_process_of
from para_core.same_bits.row_check import CHECKED, RowCheck
from para_core.same_bits.rows import CONVOLUTIONS, convolution, few_rows, linear


class SameBits(TorchFunctionMode):
    """Inside this context, products of the current call of ``module`` have the bits of one process.

    Args:
        module: The model, which has a plan.
        samples: The number of samples of the call on all ranks.
        found: What the check of the first call found.
        check: What compares each new function and shape with one process; None to compare nothing.
    """

    def __init__(self, module: nn.Module, samples: int, found: Found, check: RowCheck | None) -> None:
        super().__init__()
        self._module, self._samples, self._found, self._check = module, samples, found, check
        self._sees_all = check is not None or bool(found.at_place)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in CONVOLUTIONS or (self._sees_all and func in CHECKED):
            x = args[0] if args else kwargs.get("input")
            if isinstance(x, Tensor) and x.is_floating_point():
                return self._run(
                    func, x, args[1:], {name: y for name, y in kwargs.items() if name != "input"}
                )
        return func(*args, **kwargs)

    def _run(self, func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is F.linear and not self._sees_all and prod(x.shape[:-1]) >= few_rows(x):
            return func(x, *args, **kwargs)
        one_process = one_process_of(self._module, self._samples)
        if one_process.is_this_process:
            return func(x, *args, **kwargs)
        tokens = self._place_of_tokens(func, one_process, x, args, kwargs)
        if self._found.at_place and kind_of(func, x, args, kwargs) in self._found.at_place:
            output = compute_at_place(func, one_process, tokens, x, args, kwargs)
        elif func is F.linear:
            output = linear(one_process, tokens, x, *args, **kwargs)
        elif func in CONVOLUTIONS:
            output = convolution(func, one_process, x, *args, **kwargs)
        else:
            output = func(x, *args, **kwargs)
        if self._check is not None and isinstance(output, Tensor):
            return self._check.compare(func, one_process, tokens, x, output, args, kwargs)
        return output

    def _place_of_tokens(
        self,
        func: Callable[..., Any],
        one_process: OneProcess,
        x: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Tokens:
        """Return the dim of ``x`` that has this rank's tokens, and their place; None if none has."""
        if func in CONVOLUTIONS:
            return None
        kind = kind_of(func, x, args, kwargs)
        weight = None
        if func is F.linear:
            weight = args[0] if args else kwargs["weight"]
        if self._check is None:
            sequences = self._found.sequences_of(kind, weight)
        else:
            sequences = self._check.tags.sequences_of(x)
            self._found.note(kind, weight, sequences)
        return one_process.place_in_one_process(x, sequences)
