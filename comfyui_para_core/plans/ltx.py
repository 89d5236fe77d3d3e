"""Plans of LTX-Video. Compared with ComfyUI 0.33.0, ``comfy/ldm/lightricks/model.py``."""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, Plan, Split

from .recorded import RecordedPlan

LTX_VIDEO = RecordedPlan(
    cls="lightricks.model.LTXVModel",
    models="LTX-Video",
    arguments=("x", "timestep", "context", "attention_mask", "frame_rate", "keyframe_idxs", "denoise_mask"),
    adapter=Adapter(
        transformer="LTXVModel",
        pipelines="LTX-Video in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "transformer_blocks.0": {"x": Split(dim=1, segment="video")},
                # A table with an entry for each token, and whether the halves of a head are apart in it.
                "transformer_blocks.*": {
                    "pe": Entries((Split(dim=1, like="video"), None)),
                    # The modulation is [B, 1, C], or has an entry for each token.
                    "timestep": Split(dim=1, like="video", ndim=3),
                },
            },
            outputs={"transformer_blocks.-1": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={"transformer_blocks.*.attn2": (Attention(("video",), ("text",)),)},
        ),
        blocks=CachedBlocks((BlockGroup(("transformer_blocks",), ("x",), "x"),), conditions=("context",)),
    ),
)
