"""Activation checkpointing inside a mode: what ``torch.utils.checkpoint`` runs again in the backward must run under the
mode again.

The backward runs when the mode has been left, or inside ``Tensor.backward``, in which modes are off.
``torch.utils.checkpoint`` is Python that no mode sees, so the function that it keeps is replaced when the mode sees the
first sign of it: with ``use_reentrant=True`` its ``no_grad``, with ``use_reentrant=False`` its hooks on saved tensors.
Read in torch 2.13 (``torch/utils/checkpoint.py``); where its variables have other names, an error names what a user can
do.
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

# From a mode's handler to CheckpointFunction.forward: two frames of torch.no_grad, and those of modes outside of this
# one.
_MOST_FRAMES = 16
_ADVICE = "Bind the function to the mode: checkpoint(cp.bound(function), ..., use_reentrant=False)."

# Takes a function and returns it, run under a mode as it is now.
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_in_backward() -> bool:
    """Whether this thread runs a backward, in which functions are recomputed."""
    return current_graph_task_id() != -1


def bind_reentrant_checkpoint(bind: Bind) -> None:
    """Bind the function of a ``checkpoint(..., use_reentrant=True)`` that switches gradients off right now, if one
    does.

    Raises:
        RuntimeError: the function cannot be replaced.
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
    """Bind the functions of each ``checkpoint(..., use_reentrant=False)`` whose forward runs right now, if any does.

    Called at every attention call in eager code, also without gradients: a checkpoint runs those parts again, too.
    ``owner`` tells whether a function was bound before.
    """
    frame = _frame_of(top_saved_tensors_hooks(True))
    if frame is None or getattr(frame.recompute_fn, "bound_to", None) is owner:
        # Whoever bound the innermost one has bound those around it.
        return
    for hooks in all_saved_tensors_hooks():
        frame = _frame_of(hooks)
        if frame is not None and getattr(frame.recompute_fn, "bound_to", None) is not owner:
            bound: Any = bind(frame.recompute_fn)
            bound.bound_to = owner
            frame.recompute_fn = bound


def _frame_of(hooks: Any) -> Any:
    """Return the checkpoint to which hooks on saved tensors belong; None if they are of something else."""
    cells = () if hooks is None else getattr(hooks[0], "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells]
    return next((frame for frame in contents if isinstance(frame, CheckpointFrame)), None)
