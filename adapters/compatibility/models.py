"""Tests of a model: its class, plan, blocks and scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from para_core.adapters.compatibility.context import CompatibilityContext, is_unet
from para_core.adapters.models.unets import why_refused_unet
from para_core.adapters.registry import adapter_for, component_of, plan_for, why_refused
from para_core.instance_patching import has_compiled_parts, original_class, uncompiled


def unfit_unet(case: CompatibilityContext) -> Mapping[str, Any] | None:
    return {"reason": why_refused_unet(case.module)} if case.component == "unet" and not is_unet(case) else None


def compiled_unet(case: CompatibilityContext) -> bool:
    if not is_unet(case):
        return False
    replaced = bool(case.component) and component_of(case.owner, case.component) is not case.module
    return replaced or has_compiled_parts(case.module)


def has_no_plan(case: CompatibilityContext) -> bool:
    return plan_for(case.module, adapter=case.adapter) is None and not is_unet(case)


def unfit_class(case: CompatibilityContext) -> Mapping[str, Any] | None:
    reason = why_refused(case.module)
    return {"reason": reason} if reason is not None and has_no_plan(case) else None


def unknown_blocks(case: CompatibilityContext) -> bool:
    adapter = adapter_for(case.module, case.adapter)
    return adapter is None or adapter.blocks is None


def uncached_blocks(case: CompatibilityContext) -> Mapping[str, Any] | None:
    adapter = adapter_for(case.module, case.adapter)
    if adapter is None or adapter.blocks is not None or adapter.uncached is None:
        return None
    return {"reason": adapter.uncached}


def perturbed_joint_attention(case: CompatibilityContext) -> bool:
    joint = original_class(case.module).__name__ == "SD3Transformer2DModel"
    return joint and case.ranks > 1 and hasattr(case.owner, "pag_applied_layers")


def was_replaced(case: CompatibilityContext) -> bool:
    return bool(case.component) and uncompiled(component_of(case.owner, case.component)) is not case.module


def no_scheduler(case: CompatibilityContext) -> Mapping[str, Any] | None:
    needs = () if case.options is None else case.options.needs_schedule
    return {"option": needs[0]} if needs and getattr(case.owner, "scheduler", None) is None else None
