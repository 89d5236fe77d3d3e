"""Plans of models whose blocks take text and image tokens as two tensors. Compared with ComfyUI 0.33.0.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them, only the functions here (tests/comfyui/test_pack.py). See `plans/__init__.py`, which finds them here.

Models that take both as one tensor are in `one_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Replicate, Split

from .recorded import RecordedPlan

IMAGE, TEXT = Split(dim=1, segment="image"), Split(dim=1, segment="text")
# The blocks of Stable Diffusion 3 take text and image by position.
FIRST, SECOND = "args[0]", "args[1]"

SD3 = RecordedPlan(
    cls="modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    models="Stable Diffusion 3 and 3.5",
    arguments=("x", "timesteps", "context", "y", "control"),
    adapter=Adapter(
        transformer="OpenAISignatureMMDITWrapper",
        pipelines="Stable Diffusion 3 in ComfyUI",
        plan=Plan(
            inputs={"control": Split(dim=1, like="image")},
            inner={"joint_blocks.0": {SECOND: IMAGE, FIRST: TEXT}},
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("joint_blocks",), (FIRST, SECOND), measured=SECOND),),
            conditions=("context",),
            uncached=("control",),
        ),
    ),
)

AURA_FLOW = RecordedPlan(
    cls="aura.mmdit.MMDiT",
    models="AuraFlow",
    arguments=("x", "timestep", "context"),
    adapter=Adapter(
        transformer="MMDiT",
        pipelines="AuraFlow in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"double_layers.0": {"x": IMAGE, "c": Replicate(dim=1, segment="text")}},
            outputs={"final_linear": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (
                BlockGroup(("double_layers",), ("c", "x"), measured="x"),
                BlockGroup(("single_layers",), ("cx",), measured="cx"),
            ),
            conditions=("context",),
        ),
    ),
)

COGVIDEOX = RecordedPlan(
    cls="cogvideo.model.CogVideoXTransformer3DModel",
    models="CogVideoX",
    arguments=("x", "timestep", "context", "ofs"),
    adapter=Adapter(
        transformer="CogVideoXTransformer3DModel",
        pipelines="CogVideoX in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
                "blocks.*": {"image_rotary_emb": Split(dim=0, like="image")},
            },
            outputs={"norm_out": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("blocks",), ("hidden_states", "encoder_hidden_states")),), conditions=("context",)
        ),
    ),
)


def _remove_padding(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments without the padding of the text. The blocks cut it off by its number of tokens."""
    context, mask, tokens = arguments["context"], arguments.get("attention_mask"), arguments.get("num_tokens")
    if mask is None or tokens is None or tokens >= context.shape[1] or mask[:, tokens:].any():
        return arguments
    return {**arguments, "context": context[:, :tokens], "attention_mask": mask[:, :tokens]}


MOCHI = RecordedPlan(
    cls="genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    models="Mochi",
    arguments=("x", "timestep", "context", "attention_mask", "num_tokens"),
    adapter=Adapter(
        transformer="AsymmDiTJoint",
        pipelines="Mochi in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                # Blocks take the first text tokens by their number, so each rank has all of them.
                "blocks.0": {"x": IMAGE, "y": Replicate(dim=1, segment="text")},
                "blocks.*": {"rope_cos": Split(dim=0, like="image"), "rope_sin": Split(dim=0, like="image")},
            },
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("image", "text"),
        ),
        blocks=CachedBlocks((BlockGroup(("blocks",), ("x", "y"), measured="x"),), conditions=("context",)),
    ),
    prepare=_remove_padding,
)

LENS = RecordedPlan(
    cls="lens.model.LensTransformer2DModel",
    models="Lens",
    arguments=("x", "timestep", "context", "attention_mask"),
    adapter=Adapter(
        transformer="LensTransformer2DModel",
        pipelines="Lens in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "transformer_blocks.0": {"hidden_states": IMAGE},
                "transformer_blocks.*": {
                    "freqs_cis": Split(dim=2, like="image", then_replicated=True),
                    "attention_mask": Split(dim=3, like="image", then_replicated=True),
                },
            },
            outputs={"proj_out": Gather(dim=1, segment="image")},
            joint_order=("image", "text"),
            attention={"transformer_blocks.*.attn": (Attention(("image", "text"), mask="keys"),)},
        ),
        blocks=CachedBlocks(
            (BlockGroup(("transformer_blocks",), ("encoder_hidden_states", "hidden_states")),),
            conditions=("context",),
        ),
    ),
)

MAGE_FLOW = RecordedPlan(
    cls="mage_flow.model.MageFlowTransformer2DModel",
    models="Mage-Flow",
    arguments=("x", "timestep", "context", "attention_mask", "ref_latents"),
    adapter=Adapter(
        transformer="MageFlowTransformer2DModel",
        pipelines="Mage-Flow in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "transformer_blocks.0": {
                    "hidden_states": IMAGE,
                    "encoder_hidden_states": Replicate(dim=1, segment="text"),
                },
                "transformer_blocks.*": {"image_rotary_emb": Split(dim=2, like="image", after="text")},
            },
            outputs={"proj_out": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("transformer_blocks",), ("encoder_hidden_states", "hidden_states")),),
            conditions=("context",),
        ),
    ),
)

JOY_IMAGE = RecordedPlan(
    cls="joyimage.model.JoyImageTransformer3DModel",
    models="JoyImage",
    arguments=("hidden_states", "timestep", "context", "ref_latents"),
    adapter=Adapter(
        transformer="JoyImageTransformer3DModel",
        pipelines="JoyImage in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "double_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
                "double_blocks.*": {"image_rotary_emb": Split(dim=1, like="image")},
            },
            # The model then takes the tokens before those of reference images.
            outputs={"double_blocks.-1": Gather(dim=1, segment="image")},
            joint_order=("image", "text"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("double_blocks",), ("hidden_states", "encoder_hidden_states")),),
            conditions=("context",),
        ),
    ),
)

HUNYUAN3D = RecordedPlan(
    cls="hunyuan3d.model.Hunyuan3Dv2",
    models="Hunyuan3D 2",
    arguments=("x", "timestep", "context", "guidance"),
    adapter=Adapter(
        transformer="Hunyuan3Dv2",
        pipelines="Hunyuan3D 2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"double_blocks.0": {"img": IMAGE, "txt": Replicate(dim=1, segment="text")}},
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (
                BlockGroup(("double_blocks",), ("img", "txt"), measured="img"),
                BlockGroup(("single_blocks",), ("x",), measured="x"),
            ),
            conditions=("context",),
        ),
    ),
)
