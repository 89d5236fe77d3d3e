"""Plans of FLUX.1 and FLUX.2, which are one class. Compared with ComfyUI 0.33.0, ``comfy/ldm/flux/model.py``."""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.plans.plan import Gather, Plan, Replicate, Split

from .recorded import RecordedPlan

POSITIONS = Split(dim=2, like="image", after="text")

FLUX = RecordedPlan(
    cls="flux.model.Flux",
    models="FLUX.1 and FLUX.2",
    arguments=("x", "timestep", "context", "y", "guidance"),
    adapter=Adapter(
        transformer="Flux",
        pipelines="FLUX.1 and FLUX.2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "double_blocks.0": {"img": Split(dim=1, segment="image"), "txt": Replicate(dim=1, segment="text")},
                "double_blocks.*": {"pe": POSITIONS},
                "single_blocks.*": {"pe": POSITIONS},
            },
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
    ),
)
