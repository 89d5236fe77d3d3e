"""Plans of HunyuanVideo. Compared with ComfyUI 0.33.0, ``comfy/ldm/hunyuan_video/model.py``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from para_core.adapters import Adapter
from para_core.plans.plan import Plan

from .flux import BLOCKS, DOUBLE_AND_SINGLE
from .recorded import RecordedPlan


def _remove_single_blocks(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan of a model that has double blocks only, as HunyuanVideo 1.5."""
    if len(model.single_blocks):  # type: ignore[arg-type]
        return plan
    return replace(
        plan, inner={name: rules for name, rules in plan.inner.items() if name != "single_blocks.*"}
    )


HUNYUAN_VIDEO = RecordedPlan(
    cls="hunyuan_video.model.HunyuanVideo",
    models="HunyuanVideo and HunyuanImage",
    arguments=(
        *("x", "timestep", "context", "y", "guidance", "attention_mask", "txt_byt5", "clip_fea", "control"),
        "disable_time_r",
    ),
    adapter=Adapter(
        transformer="HunyuanVideo",
        pipelines="HunyuanVideo in ComfyUI",
        plan=DOUBLE_AND_SINGLE,
        complete=_remove_single_blocks,
        blocks=BLOCKS,
    ),
)
