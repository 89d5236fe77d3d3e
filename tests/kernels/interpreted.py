"""Triton kernels run on the CPU, in a process that may also compile the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle, _patch_lang
from triton.runtime.jit import JITFunction

from para_core import triton_support
from para_core.attention.backends import triton_backend


@contextmanager
def interpreted(before_launch: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None) -> Iterator[None]:
    """Interpret launches of any ``@triton.jit`` function in this context, on tensors of the CPU.
    ``before_launch`` gets a kernel's name and positional arguments, and returns those to launch with.

    A wrong ``tl.multiple_of`` is an error.

    TRITON_INTERPRET=1 does so for all of Triton and for good: functions decorated under it cannot be compiled.
    """

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if before_launch is not None:
            args = before_launch(self.fn.__name__, args)
        # Triton's own functions, such as tl.max, see the language as tl.core. Patch them once, and undo it to compile
        # afterwards. InterpretedFunction.__call__ patches in each call, which takes seconds, and undoes nothing.
        patched = _patch_lang(tl.max.fn)
        try:
            InterpretedFunction(self.fn).run(*args, grid=grid, warmup=warmup, **options)
        finally:
            patched.restore()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return _rewritten(self.fn)(*args, **options)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(JITFunction, "__call__", call),
        mock.patch.object(InterpreterBuilder, "create_dot", _dot),
        mock.patch.object(TensorHandle, "set_attr", _require_multiple),
        mock.patch.object(triton_backend, "is_interpreting", lambda: True),
        mock.patch.object(triton_support, "is_interpreting", lambda: True),
        mock.patch("para_core.kernels.product._is_interpreting", lambda: True),
    ):
        yield


@lru_cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    return InterpretedFunction(function).rewrite()


_own_dot = InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Multiply bfloat16 matrices as float32, because NumPy holds bfloat16 in integers, which would be multiplied."""
    return _own_dot(self, *[self.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)], *rest)


def _require_multiple(handle: Any, name: str, divisors: list[int]) -> None:
    """Raise if a kernel tells the compiler of a divisor that is none, which the interpreter itself would ignore."""
    if name == "tt.divisibility":
        assert not (handle.data % divisors[-1]).any(), f"{handle.data} is no multiple of {divisors[-1]}"
