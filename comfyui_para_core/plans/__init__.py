"""Recorded plans of the classes of ``comfy/ldm``, as data: one file for each family.

Tests of :func:`find_plan`, and of names that a plan has twice: tests/comfyui/test_pack.py. Whether ComfyUI's
classes have these modules and parameters, only the command in the head of each file tells.
"""

from __future__ import annotations

from types import MappingProxyType

from . import (
    audio,
    cosmos,
    cross_attention,
    flux,
    hidream,
    hunyuan_video,
    joint_attention,
    ltx,
    one_stream,
    qwen_image,
    unsupported,
    wan,
)
from .recorded import RecordedPlan

_FAMILIES = (
    wan,
    flux,
    qwen_image,
    hunyuan_video,
    ltx,
    one_stream,
    joint_attention,
    cross_attention,
    cosmos,
    hidream,
    audio,
    unsupported,
)

# Every RecordedPlan that is a global variable of one of these modules, by the name of its class.
PLANS = MappingProxyType(
    {
        plan.cls: plan
        for family in _FAMILIES
        for plan in vars(family).values()
        if isinstance(plan, RecordedPlan)
    }
)


def find_plan(cls: type) -> RecordedPlan | None:
    """Return the plan that is recorded for ``cls`` itself; None if there is none. A subclass may compute
    something else, so it has a plan of its own or none.
    """
    return PLANS.get(f"{cls.__module__.removeprefix('comfy.ldm.')}.{cls.__qualname__}")
