"""Plans of Wan. Compared with ComfyUI 0.33.0, ``comfy/ldm/wan``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them; ``make test`` runs
:data:`WAN` alone, on a stand-in for ComfyUI (tests/comfyui/test_pack.py). See `plans/__init__.py`, which
finds them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

from .recorded import RecordedPlan

VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=1, like="video")
TO_TEXT = (Attention(("video",), ("text",)),)


def _repeat_times_for_tokens(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with a timestep for each token, if they have one for each frame.

    The blocks repeat what they get for a frame for its tokens, and count the tokens of their input, which on
    a rank are those of this rank only.
    """
    timestep = arguments["timestep"]
    if timestep.ndim < 2 or timestep.shape[1] < 2:
        return arguments
    patch: Any = model.patch_size
    rows, columns = (
        -(-size // side) for size, side in zip(arguments["x"].shape[-2:], patch[1:], strict=True)
    )
    return {**arguments, "timestep": timestep.repeat_interleave(rows * columns, dim=1)}


def _name_times_of_frames(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Name timesteps of frames in a sequence that has other tokens too, for which
    :func:`_repeat_times_for_tokens` has no timestep.
    """
    timestep = arguments["timestep"]
    if timestep.ndim < 2 or timestep.shape[1] < 2:
        return ""
    names = ["time_dim_concat", "context_latents"]
    # Without this layer the model ignores the condition.
    if getattr(model, "ref_conv", None) is not None:
        names.append("reference_latent")
    for name in names:
        if arguments.get(name) is not None:
            return f"timesteps that differ between frames together with {name}"
    return ""


WAN = RecordedPlan(
    cls="wan.model.WanModel",
    models="Wan 2.1 and 2.2",
    arguments=(
        *("x", "timestep", "context", "clip_fea", "time_dim_concat", "context_latents", "reference_latent"),
        "denoise_mask",  # read before the cut, for the timesteps
    ),
    adapter=Adapter(
        transformer="WanModel",
        pipelines="Wan 2.1 and 2.2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"x": VIDEO},
                # The modulation is [B, 1, 6, C], or has an entry for each token.
                "blocks.*": {"freqs": POSITIONS, "e": Split(dim=1, like="video", ndim=4)},
            },
            outputs={"blocks.-1": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={"blocks.*.cross_attn": TO_TEXT},
        ),
        blocks=CachedBlocks(
            (BlockGroup(("blocks",), ("x",), measured="x"),), conditions=("context", "clip_fea")
        ),
    ),
    # ComfyUI makes timesteps of frames for this class alone (WAN22 in comfy/model_base.py), so the plans
    # below need neither.
    refusals=(_name_times_of_frames,),
    prepare=_repeat_times_for_tokens,
)

CAMERA = RecordedPlan(
    cls="wan.model.CameraWanModel",
    models="Wan Fun Camera",
    arguments=("x", "timestep", "context", "clip_fea", "camera_conditions"),
    adapter=Adapter(
        transformer="CameraWanModel",
        pipelines="Wan Fun Camera in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"blocks.0": {"x": VIDEO}, "blocks.*": {"freqs": POSITIONS}},
            outputs={"blocks.-1": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={"blocks.*.cross_attn": TO_TEXT},
        ),
        blocks=CachedBlocks(
            (BlockGroup(("blocks",), ("x",), measured="x"),), conditions=("context", "clip_fea")
        ),
    ),
)

VACE = RecordedPlan(
    cls="wan.model.VaceWanModel",
    models="Wan VACE",
    arguments=("x", "timestep", "context", "clip_fea", "vace_context", "vace_strength"),
    adapter=Adapter(
        transformer="VaceWanModel",
        pipelines="Wan VACE in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"x": VIDEO},
                "blocks.*": {"freqs": POSITIONS},
                # Every VACE block gets the video tokens that enter the first block.
                "vace_blocks.*": {"x": VIDEO, "freqs": POSITIONS},
                "vace_blocks.0": {"c": POSITIONS},
            },
            outputs={"head": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={"blocks.*.cross_attn": TO_TEXT, "vace_blocks.*.cross_attn": TO_TEXT},
        ),
        # VACE blocks between these add to the video tokens, so no block is skipped.
    ),
)

HUMO = RecordedPlan(
    cls="wan.model.HumoWanModel",
    models="HuMo",
    arguments=("x", "timestep", "context", "reference_latent", "audio_embed"),
    adapter=Adapter(
        transformer="HumoWanModel",
        pipelines="HuMo in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"x": VIDEO},
                "blocks.*": {"freqs": POSITIONS},
                # The tokens of a frame, perhaps on two ranks, attend to its sound, so gather them.
                "blocks.*.audio_cross_attn_wrapper": {"x": Gather(dim=1, segment="video"), 0: POSITIONS},
            },
            outputs={"blocks.-1": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={
                "blocks.*.cross_attn": TO_TEXT,
                "blocks.*.audio_cross_attn_wrapper.audio_cross_attn": (Attention(("frame",), ("sound",)),),
            },
        ),
        blocks=CachedBlocks(
            (BlockGroup(("blocks",), ("x",), measured="x"),), conditions=("context", "audio_embed")
        ),
    ),
)

ANIMATE = RecordedPlan(
    cls="wan.model_animate.AnimateWanModel",
    models="Wan 2.2 Animate",
    arguments=("x", "timestep", "context", "clip_fea", "pose_latents", "face_pixel_values"),
    adapter=Adapter(
        transformer="AnimateWanModel",
        pipelines="Wan 2.2 Animate in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"x": VIDEO},
                "blocks.*": {"freqs": POSITIONS},
                # The tokens of a frame, perhaps on two ranks, attend to the face in it, so gather them.
                "face_adapter.fuser_blocks.*": {"x": Gather(dim=1, segment="video"), 0: POSITIONS},
            },
            outputs={"head": Gather(dim=1, segment="video")},
            joint_order=("video",),
            attention={
                "blocks.*.cross_attn": TO_TEXT,
                "face_adapter.fuser_blocks.*": (Attention(("frame",), ("face",)),),
            },
        ),
        # The face adapter adds to the video tokens between blocks, so no block is skipped.
    ),
)
