"""Plans of Cosmos Predict 2. Compared with ComfyUI 0.33.0, ``comfy/ldm/cosmos/predict2.py``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them, only the functions here (tests/comfyui/test_pack.py). See `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

from .recorded import RecordedPlan

VIDEO = "x_B_T_H_W_D"  # name of the blocks' argument with the video: [B, T, H, W, D], of patches

PLAN = Plan(
    inputs={},
    inner={
        # Whole frames, because attention flattens frames, rows and columns. If there are fewer frames than
        # ranks, each rank computes all of them, which is exact and not faster.
        "blocks.0": {VIDEO: Split(dim=1, segment="video", together=(2, 3))},
        "blocks.*": {
            # Its name says [L, 1, 1, D], and the blocks get [1, L, 1, D / 2, 2, 2]: MiniTrainDIT calls them
            # with rope_emb_L_1_1_D.unsqueeze(1).unsqueeze(0) of a table [L, D / 2, 2, 2], L = T * H * W.
            "rope_emb_L_1_1_D": Split(dim=1, like="video"),
            # An entry for each frame.
            "emb_B_T_D": Split(dim=1, like="video"),
            "adaln_lora_B_T_3D": Split(dim=1, like="video"),
        },
    },
    outputs={"blocks.-1": Gather(dim=1, segment="video")},
    joint_order=("video",),
    attention={"blocks.*.cross_attn": (Attention(("video",), ("text",)),)},
)
BLOCKS = CachedBlocks((BlockGroup(("blocks",), (VIDEO,), measured=VIDEO),), conditions=("context",))
ARGUMENTS = (
    *("x", "timesteps", "context", "padding_mask"),
    "fps",  # read before the blocks, for the positions
    "denoise_mask",  # read before the cut, for the timesteps
)


def _expand_times_to_frames(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with a timestep for each frame of patches. A single one would have no frames to split."""
    times = arguments["timesteps"]
    patch: Any = model.patch_temporal
    if times.ndim > 1 and times.shape[1] > 1:
        return arguments
    frames = -(-arguments["x"].shape[2] // patch)
    return {**arguments, "timesteps": times.reshape(-1, 1).expand(-1, frames)}


COSMOS_PREDICT2 = RecordedPlan(
    cls="cosmos.predict2.MiniTrainDIT",
    models="Cosmos Predict 2",
    arguments=ARGUMENTS,
    adapter=Adapter("MiniTrainDIT", "Cosmos Predict 2 in ComfyUI", PLAN, blocks=BLOCKS),
    prepare=_expand_times_to_frames,
)

# A model of images, which have one frame, so every rank computes all of it: exact, and never faster.
ANIMA = RecordedPlan(
    cls="anima.model.Anima",
    models="Anima",
    arguments=ARGUMENTS,
    adapter=Adapter("Anima", "Anima in ComfyUI", PLAN, blocks=BLOCKS),
    prepare=_expand_times_to_frames,
)
