"""Classes of ``comfy/ldm`` that run on one rank only, each with the reason.

`checks.require_runnable` raises with it. Tests: tests/comfyui/test_pack.py, for the UNet.
"""

from __future__ import annotations

from .recorded import RecordedPlan

_CONVOLUTIONS = "it is a UNet, whose convolutions need the rows of neighbouring ranks."

UNET = RecordedPlan(
    cls="modules.diffusionmodules.openaimodel.UNetModel",
    models="Stable Diffusion 1.5, 2 and XL, and Stable Video Diffusion",
    refused=_CONVOLUTIONS,
)
CASCADE_C = RecordedPlan(cls="cascade.stage_c.StageC", models="Stable Cascade", refused=_CONVOLUTIONS)
CASCADE_B = RecordedPlan(cls="cascade.stage_b.StageB", models="Stable Cascade", refused=_CONVOLUTIONS)
CAUSAL_WAN = RecordedPlan(
    cls="wan.ar_model.CausalWanModel",
    models="Wan that makes frames one after the other",
    refused="its blocks keep the keys of earlier frames between calls, in a value that is not sent to the ranks.",
)
COSMOS1 = RecordedPlan(
    cls="cosmos.model.GeneralDIT",
    models="Cosmos 1",
    refused="it adds positions to all tokens between its blocks, and compares the shapes of both before.",
)
