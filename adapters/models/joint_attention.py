"""Adapters of models in which text and image (or video) tokens attend together: Stable Diffusion 3, CogView and others.

The others are AuraFlow, EasyAnimate, GLM-Image, HiDream-I1, HunyuanImage 2.1, JoyImage-Edit and Motif-Video. Written
for diffusers 0.42.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_FIRST, TEXT_LAST, chained, of_samples
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, Plan, ShardRule, Split

IMAGE, ALL_IMAGE = Split(dim=1, segment="image"), Gather(dim=1, segment="image")
VIDEO, ALL_VIDEO = Split(dim=1, segment="video"), Gather(dim=1, segment="video")
POSITIONS, VIDEO_POSITIONS = Split(dim=0, like="image"), Split(dim=0, like="video")
TEXT_THEN_IMAGE, IMAGE_THEN_TEXT = ("text", "image"), ("image", "text")
BLOCKS = chained("transformer_blocks", streams=TEXT_LAST)

SD3 = Adapter(
    transformer="SD3Transformer2DModel",
    pipelines="Stable Diffusion 3",
    plan=Plan(
        # ControlNet residuals: tensors [B, S, C], which the model adds to the image tokens between blocks.
        inputs={"block_controlnet_hidden_states": Split(dim=1, like="image")},
        # Split after the position embedding, because a call may skip any block (skip_layers), also the first.
        inner={"pos_embed": {0: IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=IMAGE_THEN_TEXT,
        attention={
            # After the joint attention, image tokens attend to image tokens and to the tokens of an IP-Adapter.
            "transformer_blocks.*.attn": (Attention(IMAGE_THEN_TEXT), Attention(("image",), ("image", "ip_adapter"))),
            # Stable Diffusion 3.5 medium has a second attention among the image tokens.
            "transformer_blocks.*.attn2": (Attention(("image",)),),
        },
        # joint_attention_kwargs may hold embeddings of IP-Adapter images, which have a batch dim.
        batched=of_samples("pooled_projections", "block_controlnet_hidden_states", "joint_attention_kwargs"),
    ),
    blocks=chained(
        "transformer_blocks",
        streams=TEXT_FIRST,
        between=("block_controlnet_hidden_states",),
        conditions=("encoder_hidden_states", "pooled_projections"),
        uncached=("skip_layers",),
    ),
)

AURAFLOW = Adapter(
    transformer="AuraFlowTransformer2DModel",
    pipelines="AuraFlow",
    plan=Plan(
        inputs={},
        inner={"joint_transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        # The model's register tokens precede the text tokens and are part of the text segment.
        joint_order=TEXT_THEN_IMAGE,
        batched=of_samples("attention_kwargs"),
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("joint_transformer_blocks",), TEXT_FIRST, chained=True),
            BlockGroup(("single_transformer_blocks",), chained=True),
        )
    ),
)

COGVIEW3_PLUS = Adapter(
    transformer="CogView3PlusTransformer2DModel",
    pipelines="CogView 3+",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=TEXT_THEN_IMAGE,
        batched=of_samples("original_size", "target_size", "crop_coords"),
    ),
    blocks=BLOCKS,
)

COGVIEW4_PLAN = Plan(
    inputs={},
    inner={
        "transformer_blocks.0": {"hidden_states": IMAGE},
        "transformer_blocks.*": {"image_rotary_emb": POSITIONS},
    },
    outputs={"proj_out": ALL_IMAGE},
    joint_order=TEXT_THEN_IMAGE,
    refused={"attention_mask": "its processor makes numbers of it for the tokens that one rank holds"},
)

COGVIEW4 = Adapter(transformer="CogView4Transformer2DModel", pipelines="CogView 4", plan=COGVIEW4_PLAN, blocks=BLOCKS)

# Only text-to-image runs in parallel. With input images the model caches their keys; attention then has more keys than
# the sequence has tokens, and raises.
GLM_IMAGE = Adapter(transformer="GlmImageTransformer2DModel", pipelines="GLM-Image", plan=COGVIEW4_PLAN, blocks=BLOCKS)

# Rule for tensors whose dim 1 has the entries of the image tokens first, then those of the replicated text tokens.
WITH_TEXT = Split(dim=1, like="image", then_replicated=True)
HIDREAM_RULES: dict[str | int, ShardRule] = {"hidden_states_masks": WITH_TEXT, "image_rotary_emb": WITH_TEXT}

HIDREAM = Adapter(
    transformer="HiDreamImageTransformer2DModel",
    pipelines="HiDream-I1",
    plan=Plan(
        inputs={},
        inner={
            "double_stream_blocks.0": {"hidden_states": IMAGE},
            "double_stream_blocks.*": HIDREAM_RULES,
            "single_stream_blocks.*": HIDREAM_RULES,
        },
        outputs={"final_layer": ALL_IMAGE},
        joint_order=IMAGE_THEN_TEXT,
        batched={
            **dict.fromkeys(("hidden_states", "timesteps", "encoder_hidden_states_t5", "pooled_embeds"), 0),
            **dict.fromkeys(("img_ids", "img_sizes", "hidden_states_masks", "attention_kwargs"), 0),
            "encoder_hidden_states_llama3": 1,
        },
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("double_stream_blocks",), TEXT_LAST),
            BlockGroup(("single_stream_blocks",)),
        ),
        conditions=("encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds"),
    ),
)

HUNYUAN_IMAGE = Adapter(
    transformer="HunyuanImageTransformer2DModel",
    pipelines="HunyuanImage 2.1",
    plan=Plan(
        inputs={},
        inner={"rope": {0: POSITIONS, 1: POSITIONS}, "transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        # Text comes after the image, as in the attention masks that the model makes for the full sequence.
        joint_order=IMAGE_THEN_TEXT,
    ),
    blocks=chained(
        "transformer_blocks",
        "single_transformer_blocks",
        streams=TEXT_LAST,
        conditions=("encoder_hidden_states", "encoder_hidden_states_2"),
    ),
)

EASYANIMATE = Adapter(
    transformer="EasyAnimateTransformer3DModel",
    pipelines="EasyAnimate",
    plan=Plan(
        inputs={},
        inner={
            "rope_embedding": {0: VIDEO_POSITIONS, 1: VIDEO_POSITIONS},
            "transformer_blocks.0": {"hidden_states": VIDEO},
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("text", "video"),
        batched=of_samples("timestep_cond", "encoder_hidden_states_t5", "inpaint_latents", "control_latents"),
    ),
    blocks=chained(
        "transformer_blocks", streams=TEXT_LAST, conditions=("encoder_hidden_states", "encoder_hidden_states_t5")
    ),
)

JOYIMAGE_BLOCKS = chained("double_blocks", streams=TEXT_LAST)


def _joyimage_plan(positions: ShardRule) -> Plan:
    return Plan(
        inputs={},
        inner={
            "double_blocks.0": {"hidden_states": IMAGE},
            "double_blocks.*": {"image_rotary_emb": positions},
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=IMAGE_THEN_TEXT,
    )


JOYIMAGE = Adapter(
    transformer="JoyImageEditTransformer3DModel",
    pipelines="JoyImage-Edit",
    # image_rotary_emb is a tuple (image positions, text positions); text is replicated.
    plan=_joyimage_plan(Entries((POSITIONS, None))),
    blocks=JOYIMAGE_BLOCKS,
)

JOYIMAGE_PLUS = Adapter(
    transformer="JoyImageEditPlusTransformer3DModel",
    pipelines="JoyImage-Edit Plus",
    plan=_joyimage_plan(Split(dim=1, like="image")),
    blocks=JOYIMAGE_BLOCKS,
)


def _with_decoder(plan: Plan, module: nn.Module) -> Plan:
    """Return ``plan`` with the decoder blocks' attention added, over decoded video tokens followed by encoded ones."""
    config: Any = module.config
    decoding = range(config.num_single_layers - config.num_decoder_layers, config.num_single_layers)
    joined = (Attention(("video", "video")),)
    more = {f"single_transformer_blocks.{index}.attn": joined for index in decoding}
    return replace(plan, attention={**more, **plan.attention})


MOTIF = Adapter(
    transformer="MotifVideoTransformer3DModel",
    pipelines="Motif-Video",
    plan=Plan(
        inputs={},
        inner={
            # Split after this layer: the model makes attention masks from this rank's number of tokens.
            "x_embedder": {0: VIDEO},
            "transformer_blocks.*": {"image_rotary_emb": VIDEO_POSITIONS},
            "single_transformer_blocks.*": {"image_rotary_emb": VIDEO_POSITIONS},
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("video", "text"),
        attention={
            "transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "single_transformer_blocks.*.attn": (Attention(("video", "text"), mask="keys"),),
            "**.cross_attn": (Attention(("video",), ("prompt",)),),
        },
    ),
    complete=_with_decoder,
    # Only the first list is cached: decoder blocks, the last of the second, read tokens that the cache does not store.
    blocks=BLOCKS,
)
