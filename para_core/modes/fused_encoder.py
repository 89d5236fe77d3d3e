"""Disable torch's fused encoder kernels in this process while any thread is inside a mode.

In eager code torch does not use these kernels while a mode is on. Graphs that Dynamo traces do use them, and no mode
sees these calls. The kernels are therefore disabled while a mode is entered, in eager code or in a graph that is being
traced.

The switch (``torch.backends.mha``) belongs to the process, so the modes that need it off are counted per process: the
first one saves the state of the switch, and the last one restores it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from para_core.torch_internals import CompileContext, TraceId


class _Holder(NamedTuple):
    thread: int
    trace: TraceId | None  # The current Dynamo trace and its attempt; None in eager code.


class _CountedSwitch:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[_Holder] = Counter()
        self._was_on = True

    def disable(self) -> None:
        own = _this_holder()
        with self._lock:
            if not self._holders:
                self._was_on = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._drop_stale(own)
            self._holders[own] += 1

    def restore(self) -> None:
        own = _this_holder()
        with self._lock:
            if not self._holders:
                return
            self._drop_stale(own)
            # A graph that gathers without sharding calls restore() without disable(). Unary + drops its negative count.
            self._holders[own] -= 1
            self._holders = +self._holders
            if not self._holders:
                torch.backends.mha.set_fastpath_enabled(self._was_on)

    def _drop_stale(self, own: _Holder) -> None:
        """Remove the holders (callers of :meth:`disable`) that belong to traces that Dynamo has aborted.

        If Dynamo stops a trace, because of an error or to restart it, the trace never calls :meth:`restore`. Dynamo
        traces in one thread at a time. During a trace, the holders of all other traces are therefore stale; in eager
        code, the holders of all traces in this thread are.
        """
        for holder in list(self._holders):
            if holder.trace not in (None, own.trace) and (own.trace is not None or holder.thread == own.thread):
                del self._holders[holder]


def _this_holder() -> _Holder:
    return _Holder(threading.get_ident(), CompileContext.current_trace_id())


# One instance for the process, like the switch itself.
_SWITCH = _CountedSwitch()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def disable() -> None:
    """Disable torch's fused encoder kernels until :func:`restore`. In a compiled function this runs while tracing."""
    _SWITCH.disable()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def restore() -> None:
    """Undo one call of :func:`disable`. Undoing the last one, from any thread, restores the original state."""
    _SWITCH.restore()


@contextmanager
def disabled_if(needed: bool) -> Iterator[None]:
    """Disable torch's fused encoder kernels in the ``with`` block if ``needed``."""
    if needed:
        disable()
    try:
        yield
    finally:
        if needed:
            restore()
