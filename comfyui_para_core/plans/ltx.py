"""Plans of LTX-Video and LTX-2. Compared with ComfyUI 0.33.0, ``comfy/ldm/lightricks``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, Plan, Split

from .recorded import RecordedPlan

# A table with an entry for each token, and whether the halves of a head are apart in it.
POSITIONS = Entries((Split(dim=1, like="video"), None))

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
                "transformer_blocks.*": {
                    "pe": POSITIONS,
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


def _name_times_of_frames(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Name timesteps of frames, which the blocks of LTX-2 get in an object that repeats them for all tokens
    of a frame.
    """
    timestep = arguments["timestep"]
    return "timesteps that differ between frames" if timestep.ndim > 1 and timestep.shape[1] > 1 else ""


LTX2 = RecordedPlan(
    cls="lightricks.av_model.LTXAVModel",
    models="LTX-2",
    arguments=("x", "timestep", "a_timestep", "context", "attention_mask", "frame_rate", "denoise_mask"),
    adapter=Adapter(
        transformer="LTXAVModel",
        pipelines="LTX-2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                # Blocks take video and audio as one pair, so the video is split before them. Audio is on
                # every rank.
                "patchify_proj": {0: Split(dim=1, segment="video")},
                "transformer_blocks.*": {"v_pe": POSITIONS, "v_cross_pe": POSITIONS},
            },
            outputs={"proj_out": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={
                "transformer_blocks.*.attn2": (Attention(("video",), ("text",)),),
                "transformer_blocks.*.audio_attn1": (Attention(("audio",)),),
                "transformer_blocks.*.audio_attn2": (Attention(("audio",), ("text",)),),
                "transformer_blocks.*.audio_to_video_attn": (Attention(("video",), ("audio",)),),
                "transformer_blocks.*.video_to_audio_attn": (Attention(("audio",), ("video",)),),
            },
        ),
        # A BlockGroup describes no stream that is a pair of tensors, so no block is skipped.
    ),
    refusals=(_name_times_of_frames,),
)
