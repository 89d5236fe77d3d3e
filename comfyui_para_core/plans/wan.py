"""Plans of Wan. Compared with ComfyUI 0.33.0, ``comfy/ldm/wan/model.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

from .recorded import RecordedPlan

VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=1, like="video")
TO_TEXT = (Attention(("video",), ("text",)),)


def _times_of_frames(arguments: Mapping[str, Any]) -> str:
    """Name a timestep for each frame, which the blocks repeat for the tokens of a frame."""
    timestep = arguments["timestep"]
    return "timesteps that differ between frames" if timestep.ndim > 1 and timestep.shape[1] > 1 else ""


WAN = RecordedPlan(
    cls="wan.model.WanModel",
    models="Wan 2.1 and 2.2",
    arguments=("x", "timestep", "context", "clip_fea"),
    adapter=Adapter(
        transformer="WanModel",
        pipelines="Wan 2.1 and 2.2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"blocks.0": {"x": VIDEO}, "blocks.*": {"freqs": POSITIONS}},
            outputs={"blocks.-1": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={"blocks.*.cross_attn": TO_TEXT},
        ),
        blocks=CachedBlocks((BlockGroup(("blocks",), ("x",), "x"),), conditions=("context", "clip_fea")),
    ),
    refusals=(_times_of_frames,),
)
