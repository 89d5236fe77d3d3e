"""A torch function mode that computes small products of a model's call with the rows of one process.

:mod:`.call` enters it around each call. What is padded is in :mod:`.rows` and :mod:`.at_place`, what is
compared in :mod:`.row_check`. Tests: tests/same_bits/test_rows.py, tests/same_bits/test_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.same_bits.at_place import TorchCall, compute_at_place
from para_core.same_bits.found import Found
from para_core.same_bits.one_process import OneProcess, Tokens, one_process_of
from para_core.same_bits.row_check import CHECKED, RowCheck
from para_core.same_bits.rows import CONVOLUTIONS, convolution, enough_rows, linear


class SameBits(TorchFunctionMode):
    """Inside this context, functions of the current call of ``module`` have the bits of one process.

    With ``check``, each function of :data:`~.row_check.CHECKED` is compared. Without it, those that ``found``
    names are computed at their place in one process. In both cases, and if ``found`` names none, linear products
    of few rows are padded, and convolutions get the samples of one process.

    Args:
        module: The model, which has a plan.
        samples: The number of samples of the call on all ranks.
        found: What the check of the first call found.
        check: What compares each new function and shape with one process; None to compare nothing.
    """

    def __init__(self, module: nn.Module, samples: int, found: Found, check: RowCheck | None) -> None:
        super().__init__()
        self._module, self._samples, self._found, self._check = module, samples, found, check
        # Whether to look at all functions of CHECKED, not only at products and convolutions.
        self._sees_all = check is not None or bool(found.at_place)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in CONVOLUTIONS or (self._sees_all and func in CHECKED):
            x = args[0] if args else kwargs.get("input")
            if isinstance(x, Tensor) and x.is_floating_point():
                # Here inplace and out have names: torch's functions in Python pass them on by name, and those in C
                # take them by name only.
                others = {name: value for name, value in kwargs.items() if name != "input"}
                is_in_place = others.pop("inplace", False)
                out = others.pop("out", None)
                # Neither a check, which computes the same again, nor a function at its place may write to x
                # or out.
                output = self._run(TorchCall(func, x, args[1:], others))
                if is_in_place:
                    return x.copy_(output)
                if out is not None:
                    return out.resize_(output.shape).copy_(output)
                return output
        return func(*args, **kwargs)

    def _run(self, call: TorchCall) -> Any:
        """Return the result of one function, with the bits of one process if it was found to depend on rows."""
        func, x = call.func, call.x
        if func is F.linear and not self._sees_all and prod(x.shape[:-1]) >= enough_rows(x):
            return call.on(x)
        if func in CONVOLUTIONS and x.ndim != CONVOLUTIONS[func]:
            # A single image has channels in dim 0, where others have samples.
            return call.on(x)
        one_process = one_process_of(self._module, self._samples)
        if one_process.is_this_process:
            return call.on(x)
        tokens = self._place_of_tokens(call, one_process)
        if self._found.at_place and call.kind in self._found.at_place:
            output = compute_at_place(call, one_process, tokens)
        elif func is F.linear:
            output = linear(one_process, tokens, x, *call.args, **call.kwargs)
        elif func in CONVOLUTIONS:
            output = convolution(func, one_process, x, *call.args, **call.kwargs)
        else:
            output = call.on(x)
        if self._check is not None and isinstance(output, Tensor):
            return self._check.compare(call, one_process, tokens, output)
        return output

    def _place_of_tokens(self, call: TorchCall, one_process: OneProcess) -> Tokens:
        """Return the dim of the tensor that has this rank's tokens, and their place; None if none has."""
        if call.func in CONVOLUTIONS:
            return None
        if self._check is None:
            sequences = self._found.sequences_of(call)
        else:
            sequences = self._check.tags.sequences_of(call.x)
            self._found.note(call, sequences)
        return one_process.place_in_one_process(call.x, sequences)
