"""Plans of Stable Diffusion 3. Compared with ComfyUI 0.33.0, ``comfy/ldm/modules/diffusionmodules/mmdit.py``."""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Split

from .recorded import RecordedPlan

# The blocks take (text, image) by position.
TEXT, IMAGE = "args[0]", "args[1]"

SD3 = RecordedPlan(
    cls="modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    models="Stable Diffusion 3 and 3.5",
    arguments=("x", "timesteps", "context", "y", "control"),
    adapter=Adapter(
        transformer="OpenAISignatureMMDITWrapper",
        pipelines="Stable Diffusion 3 in ComfyUI",
        plan=Plan(
            inputs={"control": Split(dim=1, like="image")},
            inner={"joint_blocks.0": {IMAGE: Split(dim=1, segment="image"), TEXT: Split(dim=1, segment="text")}},
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("joint_blocks",), (TEXT, IMAGE), IMAGE),), conditions=("context",), uncached=("control",)
        ),
    ),
)
