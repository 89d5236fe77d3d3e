"""Support activation checkpointing inside a mode: a function that the backward recomputes must run under the
mode.

The backward runs after the mode has been left, or inside ``Tensor.backward``, where modes are off. A
checkpointed function is therefore *bound* to the mode: replaced by a wrapper that enters the mode again.
Modes do not see the call of ``torch.utils.checkpoint``, which is plain Python, so the function is bound at a
later call that a mode does see:

- ``use_reentrant=True``, and other checkpoints written as an ``autograd.Function`` that keeps its function as
  ``ctx.run_function`` (guided-diffusion's, for example): when its forward enters ``no_grad``. The function is
  found on the Python stack.
- ``use_reentrant=False``: at an attention call. The function is found through the hooks on saved tensors that
  the checkpoint registered.
- In a diffusers model under a plan: at the model's own checkpoint function, which
  :func:`bind_model_checkpoints` replaces.

Written for torch 2.13 (``torch/utils/checkpoint.py``). If another version renames the variables of the
reentrant checkpoint, an error tells the user to bind the function with ``cp.bound``.

How a bound function runs is not here: ``bind`` is ``UnifiedAttnMode.bound`` or
:func:`para_core.plans.recomputation.bind_to_call`. Tests: tests/modes/test_recomputation.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from para_core.modes.registry import PLANNED_CALLS, RECOMPUTATION, Bind, Recomputation
from para_core.torch_internals import (
    CheckpointFrame,
    all_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

# Maximum number of stack frames that are searched for CheckpointFunction.forward. Between this frame and the
# mode's handler there are two frames of torch.no_grad, and the frames of other modes.
_MAX_FRAMES = 16
_ADVICE = "Bind the function to the mode: checkpoint(cp.bound(function), ..., use_reentrant=False)."


def bind_reentrant_checkpoint(bind: Bind) -> None:
    """Bind the function of the ``checkpoint(..., use_reentrant=True)`` whose forward is entering ``no_grad``.

    Also bind the ``ctx.run_function`` of any other ``autograd.Function`` whose forward is entering
    ``no_grad``. A mode calls this whenever gradients are being disabled. If no such forward is on the stack
    inside the innermost call of a model with a plan, nothing happens: a checkpoint around that call runs all
    of it again.

    Raises:
        RuntimeError: torch's checkpoint does not store its function under that name, so it cannot be
            replaced.
    """
    frame = sys._getframe(1)
    depth = 0
    while frame.f_back is not None and depth < _MAX_FRAMES:
        frame = frame.f_back
        depth += 1
        if frame.f_code in PLANNED_CALLS:
            return
        context: Any = None
        # Reading f_locals copies all local variables of a frame, so do it only if one of them is called ctx.
        if "ctx" in frame.f_code.co_varnames:
            context = frame.f_locals.get("ctx")
        function: Any = None
        if isinstance(context, FunctionCtx):
            function = getattr(context, "run_function", None)
        if callable(function):
            context.run_function = bind(function)
            return
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True recomputes in the backward, when no mode is on. "
                f"{_ADVICE}"
            )


def bind_checkpoint(owner: object, bind: Bind, hooks_outside: int = 0) -> None:
    """Bind the functions of all ``checkpoint(..., use_reentrant=False)`` calls whose forward is running.

    A mode or plan, the ``owner``, calls this at an attention call in eager code inside hooks on saved
    tensors, also with gradients disabled, because the backward recomputes the whole function. A function that
    is already bound to ``owner`` is not bound again, nor one of the checkpoints that set the outermost
    ``hooks_outside`` hooks: they began before the plan's call, and run all of it again.
    """
    innermost = top_saved_tensors_hooks(True)
    if innermost is None:
        return
    frame = _frame_of(innermost)
    if frame is not None and getattr(frame.recompute_fn, "bound_to", None) is owner:
        # If the innermost checkpoint is already bound to this mode, the call that bound it has bound the
        # outer checkpoints too. Hooks of others, such as save_on_cpu, may be entered inside a checkpoint.
        return
    all_hooks = all_saved_tensors_hooks()
    for hooks in all_hooks[: len(all_hooks) - hooks_outside]:
        frame = _frame_of(hooks)
        if frame is not None and getattr(frame.recompute_fn, "bound_to", None) is not owner:
            bound: Any = bind(frame.recompute_fn)
            bound.bound_to = owner
            frame.recompute_fn = bound


def _frame_of(hooks: Any) -> Any:
    """Return torch's ``_CheckpointFrame`` of the checkpoint that registered ``hooks`` on saved tensors, else None."""
    cells = getattr(hooks[0], "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells]
    return next((frame for frame in contents if isinstance(frame, CheckpointFrame)), None)


@contextmanager
def bind_model_checkpoints(bind: Bind, module: nn.Module) -> Iterator[None]:
    """Bind each function that the activation checkpointing of a diffusers model recomputes in the backward.

    Affects the checkpoints of ``module`` and its submodules inside the ``with`` block. Does nothing without
    gradients, or while tracing, because a graph contains its own recomputation. A submodule that has the
    flag of diffusers and calls ``torch.utils.checkpoint`` itself is left to the other two functions.
    """
    checkpointing = [
        (submodule, submodule._gradient_checkpointing_func)
        for submodule in _find_checkpointing(module)
        if hasattr(submodule, "_gradient_checkpointing_func")
    ]
    for submodule, checkpoint in checkpointing:
        submodule._gradient_checkpointing_func = partial(_run_bound_checkpoint, bind, checkpoint)
    try:
        yield
    finally:
        for submodule, checkpoint in checkpointing:
            submodule._gradient_checkpointing_func = checkpoint


def check_checkpointing(module: nn.Module) -> None:
    """Raise ``RuntimeError`` if activation checkpointing of a diffusers model is on and gradients are
    enabled. Its recomputation intercepts attention only, and would miss the sums over ranks and halos of a
    plan.
    """
    if _find_checkpointing(module):
        raise RuntimeError(
            f"{type(module).__name__} has activation checkpointing on, and its plan has sums or halos over ranks, "
            "which would be missing where the backward computes its blocks again. Call "
            "disable_gradient_checkpointing(), or train on one rank."
        )


def _find_checkpointing(module: nn.Module) -> list[Any]:
    """Return the submodules whose flag ``gradient_checkpointing`` is on.
    The list is empty if gradients are disabled and while tracing.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return []
    return [
        submodule for submodule in module.modules() if getattr(submodule, "gradient_checkpointing", False)
    ]


def _run_bound_checkpoint(
    bind: Any, checkpoint: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return checkpoint(bind(function), *args, **kwargs)


RECOMPUTATION.append(
    Recomputation(
        gradients_disabled=bind_reentrant_checkpoint,
        attention_called=bind_checkpoint,
        during_call=bind_model_checkpoints,
        check_exchanges=check_checkpointing,
    )
)
