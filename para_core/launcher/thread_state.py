"""The settings of torch that belong to a thread, gradients and autocast: a call on a rank has those of the caller.

``handle.py`` reads them, and applies them to the thread of an awaited call, with its callbacks; ``rank.py``
applies them on each rank. Tests: tests/launcher/test_calls.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class CallerThreadState:
    """The thread's settings. The defaults are those of a new thread."""

    grad: bool = True
    inference: bool = False
    autocast: dict[str, Any] = field(default_factory=dict)  # dtypes by device type, where autocast is on


def current_state() -> CallerThreadState:
    """Return the settings of this thread. Does not initialize CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):
        return CallerThreadState()
    autocast = {
        device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)
    }
    return CallerThreadState(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


@contextmanager
def apply_state(state: CallerThreadState) -> Iterator[None]:
    """Inside this context, use the settings ``state``."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(state.grad))
        if state.inference:
            stack.enter_context(torch.inference_mode())
        for device, dtype in state.autocast.items():
            stack.enter_context(torch.autocast(device, dtype))
        yield
