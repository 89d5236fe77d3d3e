"""Plans of models whose blocks take text and image tokens as two tensors. Compared with ComfyUI 0.33.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Replicate, Split

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
            (BlockGroup(("joint_blocks",), (FIRST, SECOND), SECOND),), conditions=("context",), uncached=("control",)
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
            (BlockGroup(("double_layers",), ("c", "x"), "x"), BlockGroup(("single_layers",), ("cx",), "cx")),
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


def _without_padding(model: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments without the padding of the text. The blocks cut it off by its number of tokens."""
    context, mask, tokens = arguments["context"], arguments["attention_mask"], arguments["num_tokens"]
    if tokens >= context.shape[1] or mask[:, tokens:].any():
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
        blocks=CachedBlocks((BlockGroup(("blocks",), ("x", "y"), "x"),), conditions=("context",)),
    ),
    prepare=_without_padding,
)
