"""torch's fused encoder kernels are off in this process while any thread is inside a mode.

In eager code torch leaves them when a mode is on. Dynamo takes them all the same, and shows them to no mode: so they
are off while a mode is entered, also while one is entered in a graph that is being traced.

The switch (``torch.backends.mha``) is one for the whole process, so its holders are counted for the whole process: the
first one in remembers how it was, the last one out puts it back.
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
    trace: TraceId | None  # what Dynamo traces right now, and the how-manieth time; None in eager code


class _CountedSwitch:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[_Holder] = Counter()
        self._was_on = True

    def hold(self) -> None:
        own = _this_holder()
        with self._lock:
            if not self._holders:
                self._was_on = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._drop_stale(own)
            self._holders[own] += 1

    def release(self) -> None:
        own = _this_holder()
        with self._lock:
            if not self._holders:
                return
            self._drop_stale(own)
            # A graph that gathers what it did not shard releases what it never held.
            self._holders[own] -= 1
            self._holders = +self._holders
            if not self._holders:
                torch.backends.mha.set_fastpath_enabled(self._was_on)

    def _drop_stale(self, own: _Holder) -> None:
        """Dynamo may stop tracing in the middle, to begin again or with an error, and then nothing is released.

        It traces in one thread at a time: what another trace holds is stale while one is running, and what a trace of
        this thread holds is stale in eager code.
        """
        for holder in list(self._holders):
            if holder.trace not in (None, own.trace) and (own.trace is not None or holder.thread == own.thread):
                del self._holders[holder]


def _this_holder() -> _Holder:
    return _Holder(threading.get_ident(), CompileContext.current_trace_id())


# As the switch itself: one for the process.
_SWITCH = _CountedSwitch()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def switch_off() -> None:
    """Forbid torch's fused encoder kernels until :func:`put_back`; while a graph is traced, this runs then."""
    _SWITCH.hold()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def put_back() -> None:
    """Undo one :func:`switch_off`; the last one, in whatever thread, allows what was allowed before the first."""
    _SWITCH.release()


@contextmanager
def held_off(needed: bool) -> Iterator[None]:
    """Inside, torch's fused encoder kernels are forbidden, if that is ``needed``."""
    if needed:
        switch_off()
    try:
        yield
    finally:
        if needed:
            put_back()
