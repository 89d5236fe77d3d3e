"""Disable torch's fused kernels of transformer encoder layers in this process while any thread is inside a
mode.

In eager code torch itself does not use these kernels inside a mode. Graphs that Dynamo traces do use them,
and modes do not see the calls. The kernels are therefore disabled as long as a mode is active, in eager code
or in a graph that is being traced. A trace that Dynamo aborts inside a mode leaves them disabled until the
next mode begins or ends.

The switch (``torch.backends.mha``) belongs to the process, so the active modes are counted per process: the
first mode saves the state of the switch, and the last mode restores this state.

:mod:`.unified` calls :func:`disable` and :func:`restore`. For models that have encoder layers
:mod:`para_core.plans.region` uses :func:`disable_if`, and so does :mod:`para_core.plans.recomputation` around
code that a backward runs again, perhaps in another thread. Tests: tests/modes/test_unified.py.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from para_core.torch_internals import CompileContext, TraceId


class _CountedSwitch:
    """A count of how often each thread and trace has disabled the kernels.
    The process has one switch and one count.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # How often each holder has disabled the kernels: a thread, and its Dynamo trace, which is None in
        # eager code. Each restart of a trace has a new id.
        self.holders: Counter[tuple[int, TraceId | None]] = Counter()
        self.was_on = True

    def drop_stale(self, own_thread: int, own_trace: TraceId | None) -> None:
        """Remove the holders that belong to traces that Dynamo has aborted.

        If Dynamo stops a trace, because of an error or to restart it, the trace never calls :func:`restore`.
        Dynamo traces in one thread at a time. During a trace, the holders of all other traces are therefore
        removed; in eager code, the holders of all traces in this thread, and in threads that have ended.
        """
        for thread, trace in list(self.holders):
            if trace in (None, own_trace):
                continue
            if own_trace is not None or thread == own_thread or thread not in sys._current_frames():
                del self.holders[thread, trace]


_SWITCH = _CountedSwitch()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def disable() -> None:
    """Disable torch's fused encoder kernels until :func:`restore`.
    In a compiled function this runs while tracing.
    """
    holder = (threading.get_ident(), CompileContext.current_trace_id())
    with _SWITCH.lock:
        if not _SWITCH.holders:
            _SWITCH.was_on = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _SWITCH.drop_stale(*holder)
        _SWITCH.holders[holder] += 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def restore() -> None:
    """Undo one call of :func:`disable`, which this thread made.
    Once the calls of all threads are undone, the original state is restored.
    """
    holder = (threading.get_ident(), CompileContext.current_trace_id())
    with _SWITCH.lock:
        if not _SWITCH.holders:
            return
        _SWITCH.drop_stale(*holder)
        # A graph that calls cp.gather without cp.shard calls restore() without disable(): there
        # UnifiedAttnMode._end() runs, and no _begin(). Unary + of a Counter drops counts that are not
        # positive.
        _SWITCH.holders[holder] -= 1
        _SWITCH.holders = +_SWITCH.holders
        if not _SWITCH.holders:
            torch.backends.mha.set_fastpath_enabled(_SWITCH.was_on)


@contextmanager
def disable_if(needed: bool) -> Iterator[None]:
    """Return a context in which torch's fused encoder kernels are disabled if ``needed`` is True."""
    if needed:
        disable()
    try:
        yield
    finally:
        if needed:
            restore()
