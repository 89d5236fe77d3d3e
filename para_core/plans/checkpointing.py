"""Activation checkpointing of diffusers models under a plan: intercept attention also while the backward recomputes
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from para_core.modes.recomputation import Bind


@contextmanager
def recomputed_under(bind: Bind | None, module: nn.Module) -> Iterator[None]:
    """Replace each function that diffusers' activation checkpointing recomputes in the backward by ``bind(function)``,
    whose recomputation runs under the plan.

    Affects the checkpoints that ``module`` and its submodules make inside the ``with`` block. Does nothing if ``bind``
    is None, if gradients are disabled, or while tracing, because a graph contains its own recomputation.
    """
    checkpointing = _checkpointing(module) if bind is not None else []
    for submodule, checkpoint in checkpointing:
        submodule._gradient_checkpointing_func = _bind_first(bind, checkpoint)
    try:
        yield
    finally:
        for submodule, checkpoint in checkpointing:
            submodule._gradient_checkpointing_func = checkpoint


def refuse_checkpointing(module: nn.Module) -> None:
    """Raise ``RuntimeError`` if activation checkpointing of ``module`` is on and gradients are enabled.

    Plans with linear attention or halos need this check, because the recomputation in the backward intercepts attention
    only, and would miss the sums over ranks and the halo exchange.
    """
    if _checkpointing(module):
        raise RuntimeError(
            f"{type(module).__name__} has activation checkpointing on, and its plan has sums or halos over ranks, "
            "which would be missing where the backward computes its blocks again. Call "
            "disable_gradient_checkpointing(), or train on one rank."
        )


def _checkpointing(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the submodules with activation checkpointing on, each with its checkpoint function.

    Returns an empty list if gradients are disabled or while tracing.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return []
    return [
        (submodule, submodule._gradient_checkpointing_func)
        for submodule in module.modules()
        if getattr(submodule, "gradient_checkpointing", False)
    ]


def _bind_first(bind: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(bind(function), *args, **kwargs)

    return run
