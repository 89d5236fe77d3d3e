"""Activation checkpointing inside a mode: functions that the backward recomputes must run under the mode again.

The backward runs after the mode has been left, or inside ``Tensor.backward``, where modes are off. No mode sees
``torch.utils.checkpoint`` itself, which is plain Python. The function that it stores is therefore replaced at the first
operation that reveals it: its ``no_grad`` with ``use_reentrant=True``, its hooks on saved tensors with
``use_reentrant=False``. Written for torch 2.13 (``torch/utils/checkpoint.py``). If the variables of the reentrant
version have other names, an error tells the user to bind the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

from para_core.torch_internals import (
    CheckpointFrame,
    all_saved_tensors_hooks,
    current_graph_task_id,
    top_saved_tensors_hooks,
)

# Maximum distance from a mode's handler to CheckpointFunction.forward: two frames of torch.no_grad, and those of outer
# modes.
_MOST_FRAMES = 16
_ADVICE = "Bind the function to the mode: checkpoint(cp.bound(function), ..., use_reentrant=False)."

# Returns a wrapper that runs a function under a mode in the mode's current state.
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return current_graph_task_id() != -1


def bind_reentrant_checkpoint(bind: Bind) -> None:
    """Bind the function of the ``checkpoint(..., use_reentrant=True)`` that is disabling gradients, if one is.

    Raises:
        RuntimeError: The function cannot be replaced.
    """
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and depth < _MOST_FRAMES:
        frame, depth = frame.f_back, depth + 1
        if frame.f_code is CheckpointFunction.forward.__code__:
            context: Any = frame.f_locals.get("ctx")
            if not callable(getattr(context, "run_function", None)):
                raise RuntimeError(
                    "torch.utils.checkpoint with use_reentrant=True recomputes in the backward, when no mode is on. "
                    f"{_ADVICE}"
                )
            context.run_function = bind(context.run_function)
            return


def bind_checkpoint(owner: object, bind: Bind) -> None:
    """Bind the functions of all ``checkpoint(..., use_reentrant=False)`` calls whose forward is running.

    Must be called at every attention call in eager code, also without gradients, because a checkpoint recomputes those
    parts too.

    Args:
        owner: The mode. A function that is already bound to it is not bound again.
        bind: Binds a function to the mode.
    """
    frame = _frame_of(top_saved_tensors_hooks(True))
    if frame is None or getattr(frame.recompute_fn, "bound_to", None) is owner:
        # The call that bound the innermost checkpoint has also bound the outer ones.
        return
    for hooks in all_saved_tensors_hooks():
        frame = _frame_of(hooks)
        if frame is not None and getattr(frame.recompute_fn, "bound_to", None) is not owner:
            bound: Any = bind(frame.recompute_fn)
            bound.bound_to = owner
            frame.recompute_fn = bound


def _frame_of(hooks: Any) -> Any:
    """Return the checkpoint frame that registered ``hooks`` on saved tensors, or None if it was not a checkpoint."""
    cells = () if hooks is None else getattr(hooks[0], "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells]
    return next((frame for frame in contents if isinstance(frame, CheckpointFrame)), None)
