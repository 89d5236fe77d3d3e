"""Plans of LTX-Video and LTX-2. Compared with ComfyUI 0.33.0, ``comfy/ldm/lightricks``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them. ``make test`` has no ComfyUI: it
checks only that the names of blocks, streams and conditions agree in the plan and the block stack of LTX-Video, and
which timesteps LTX-2 refuses (tests/comfyui/test_pack.py). `plans/__init__.py` finds the plans here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, Plan, Split

from .recorded import RecordedPlan

# A table with an entry for each token, which is split, and whether the halves of a head are apart in it,
# which is no tensor (None: no rule).
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
        blocks=CachedBlocks(
            (BlockGroup(("transformer_blocks",), ("x",), measured="x"),), conditions=("context",)
        ),
    ),
)


def _name_several_times(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Name a timestep for each frame or token, which the blocks of LTX-2 get in an object that may repeat
    those of frames for all tokens of a frame. Equal ones are named, too.
    """
    timestep = arguments["timestep"]
    if timestep.ndim > 1 and timestep.shape[1] > 1:
        return "one timestep for each frame or token"
    return ""


LTX2 = RecordedPlan(
    cls="lightricks.av_model.LTXAVModel",
    models="LTX-2",
    arguments=(
        *("x", "timestep", "a_timestep", "context"),
        "attention_mask",  # of the text, as in LTX-Video, with which it was compared
        "frame_rate",  # read before the tokens are split, for the positions of all
        # Read before the tokens are split; it gives each token a timestep, which is refused below. So would
        # the keyframe_idxs of LTX-Video, which come with a denoise_mask: they are not accepted here.
        "denoise_mask",
    ),
    adapter=Adapter(
        transformer="LTXAVModel",
        pipelines="LTX-2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                # Blocks take video and audio as one pair, so the video is split before them. Audio is on
                # every rank. The key 0 is the output of the layer.
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
    refusals=(_name_several_times,),
)
