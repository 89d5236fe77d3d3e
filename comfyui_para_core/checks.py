"""Refuse models, settings and workflows that cannot run on ranks.

ComfyUI's process calls :func:`require_runnable` when it loads a model (`remote_patcher`), and each rank calls
:func:`require_checked` before a call of it (`rank_model`). What cannot be sent to the ranks is refused in
`options`. Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.ldm.modules.attention
from torch import nn

from .plans import find_plan
from .plans.recorded import RecordedPlan
from .settings import Settings

# Conditions that ComfyUI gives to every model, and that only its ControlNets read.
_IGNORED = ("crossattn_controlnet",)


def require_runnable(cls: type, settings: Settings) -> None:
    """Raise ValueError if models of the class ``cls`` cannot run with ``settings``, or ComfyUI's attention cannot."""
    recorded = find_plan(cls)
    if recorded is not None and recorded.refused and (settings.ranks > 1 or settings.cache):
        raise ValueError(
            f"{cls.__name__} ({recorded.models}) cannot run on several ranks, or with a cache: {recorded.refused} Set "
            "ranks to 1 and cache to 0, or use ComfyUI's own loader."
        )
    if (
        recorded is not None
        and recorded.adapter is not None
        and settings.cache
        and recorded.adapter.blocks is None
    ):
        raise ValueError(
            f"cache is {settings.cache}, and {cls.__name__} ({recorded.models}) does something between its blocks that "
            "cannot be skipped; expected 0 for this model."
        )
    module = comfy.ldm.modules.attention
    if settings.ranks > 1 and module.optimized_attention is not module.attention_pytorch:
        raise ValueError(
            f"ComfyUI computes attention by {module.optimized_attention.__name__}; expected PyTorch's, which alone "
            "can run over several ranks. Start ComfyUI with --use-pytorch-cross-attention."
        )


def require_checked(recorded: RecordedPlan, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if ``inputs`` has an argument with which the plan of the class was not compared with ComfyUI."""
    conditions = {name for name, value in inputs.items() if _is_condition(value)}
    unknown = sorted(conditions - {*recorded.arguments, "transformer_options", *_IGNORED})
    if unknown:
        raise ValueError(
            f"this workflow gives {recorded.models} the condition {', '.join(unknown)}, with which its plan on several "
            f"ranks was not compared with ComfyUI; expected {', '.join(recorded.arguments)}. Set ranks to 1, or "
            "remove it."
        )
    for refusal in recorded.refusals:
        problem = refusal(model, inputs)
        if problem:
            raise ValueError(
                f"this workflow gives {recorded.models} {problem}, which its plan on several ranks does not "
                "describe. Set ranks to 1, or remove it."
            )


def _is_condition(value: Any) -> bool:
    """Whether ``value`` is a condition of the workflow: without one a model gets None, or an empty list or dict."""
    if isinstance(value, (list, tuple, dict)):
        return bool(value)
    return value is not None
