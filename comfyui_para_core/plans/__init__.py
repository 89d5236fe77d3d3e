"""Recorded plans of the classes of ``comfy/ldm``, as data: one file for each family.

The head of each file says with which version of ComfyUI its plans were compared. With ComfyUI installed,
``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them again, for the models whose
name in benchmarks/comfyui/cases.py contains NAME: only there is it seen whether ComfyUI's classes have the modules
and parameters that a plan names.

Of all plans, ``make test`` runs :data:`.wan.WAN` alone, on a stand-in for ComfyUI. It checks that
:data:`.unsupported.UNET` is refused, and that names that a plan has twice agree. Tests: tests/comfyui/test_pack.py.
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
