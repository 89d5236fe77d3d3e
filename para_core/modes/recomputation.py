"""Support activation checkpointing inside a mode: a function that the backward recomputes must run under the mode.

The backward runs after the mode has been left, or inside ``Tensor.backward``, where modes are off. A checkpointed
function is therefore *bound* to the mode: replaced by a wrapper that enters the mode again. No mode sees a call of
``torch.utils.checkpoint``, which is plain Python, so the function is bound at an operation that follows: with
``use_reentrant=True`` when the checkpoint enters ``no_grad``, with ``use_reentrant=False`` at an attention call, by the
hooks on saved tensors. Written for torch 2.13 (``torch/utils/checkpoint.py``). If another version renames the variables
of the reentrant checkpoint, an error tells the user to bind the function.
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

# Maximum number of stack frames between a mode's handler and CheckpointFunction.forward: two of torch.no_grad, and
# those of outer modes.
_MOST_FRAMES = 16
_ADVICE = "Bind the function to the mode: checkpoint(cp.bound(function), ..., use_reentrant=False)."

# A function that takes a function and returns a wrapper, which runs it under a mode with the mode's current layouts.
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return current_graph_task_id() != -1


def bind_reentrant_checkpoint(bind: Bind) -> None:
    """Bind the function of the ``checkpoint(..., use_reentrant=True)`` that is entering ``no_grad``, if there is one.

    Called by a mode whenever gradients are being disabled.

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

    Must be called at every attention call in eager code, also if gradients are disabled, because a checkpoint
    recomputes such parts of its function too.

    Args:
        owner: The mode. A function that is already bound to it is not bound again.
        bind: Binds a function to the mode.
    """
    frame = _frame_of(top_saved_tensors_hooks(True))
    if frame is None or getattr(frame.recompute_fn, "bound_to", None) is owner:
        # The innermost checkpoint is bound already, and whoever bound it has also bound the outer ones.
        return
    for hooks in all_saved_tensors_hooks():
        frame = _frame_of(hooks)
        if frame is not None and getattr(frame.recompute_fn, "bound_to", None) is not owner:
            bound: Any = bind(frame.recompute_fn)
            bound.bound_to = owner
            frame.recompute_fn = bound


def _frame_of(hooks: Any) -> Any:
    """Return the checkpoint frame that registered ``hooks`` on saved tensors; None if no checkpoint registered them."""
    cells = () if hooks is None else getattr(hooks[0], "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells]
    return next((frame for frame in contents if isinstance(frame, CheckpointFrame)), None)
