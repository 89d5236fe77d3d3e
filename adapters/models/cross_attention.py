"""Adapters of models whose tokens attend to text by cross-attention: PixArt, HunyuanDiT, Latte, Allegro and Helios.

Also PRX and Nucleus-Image, which attend to text and image tokens at once, and DiT, which takes class labels. Written
for diffusers 0.42.
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, of_samples
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, LastTokens, Plan, Split

IMAGE, ALL_IMAGE = Split(dim=1, segment="image"), Gather(dim=1, segment="image")
VIDEO, ALL_VIDEO = Split(dim=1, segment="video"), Gather(dim=1, segment="video")
TO_TEXT = (Attention(("image",), ("text",)),)
VIDEO_TO_TEXT = (Attention(("video",), ("text",)),)

PIXART = Adapter(
    transformer="PixArtTransformer2DModel",
    pipelines="PixArt",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"transformer_blocks.*.attn2": TO_TEXT},
        batched=of_samples("added_cond_kwargs", "cross_attention_kwargs", "attention_mask", "encoder_attention_mask"),
    ),
    blocks=chained("transformer_blocks"),
)

DIT = Adapter(
    transformer="DiTTransformer2DModel",
    pipelines="DiT",
    plan=Plan(
        inputs={},
        inner={"transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out_2": ALL_IMAGE},
        joint_order=("image",),
        batched=dict.fromkeys(("hidden_states", "timestep", "class_labels", "cross_attention_kwargs"), 0),
    ),
    blocks=chained("transformer_blocks", conditions=("class_labels",)),
    # The output layers are modulated by the embedding of the time step and class that block 0 contains.
    called_outside=("transformer_blocks.0.norm1.emb",),
)

PRX = Adapter(
    transformer="PRXTransformer2DModel",
    pipelines="PRX",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": IMAGE},
            # The rotary embedding is [B, 1, S, D / 2, 2, 2], with the tokens along dim 2.
            "blocks.*": {"image_rotary_emb": Split(dim=2, like="image")},
        },
        outputs={"final_layer": ALL_IMAGE},
        joint_order=("image",),
        # The processor makes a mask for the keys that it gets, text and image tokens of this rank.
        attention={"blocks.*.attention": (Attention(("image",), ("text", "image"), mask="keys"),)},
        batched=of_samples("attention_mask", "attention_kwargs"),
    ),
    blocks=chained("blocks"),
)

ALLEGRO = Adapter(
    transformer="AllegroTransformer3DModel",
    pipelines="Allegro",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": {
                # A tuple: the position tables, and for each token its indices into them, which are sharded.
                "image_rotary_emb": Entries((None, Split(dim=1, like="video"))),
                # The processor pads a mask to the number of keys that it gets, this rank's, so it is split.
                "attention_mask": Split(dim=2, like="video"),
            },
        },
        outputs={"proj_out": ALL_VIDEO},
        joint_order=("video",),
        attention={
            "**.attn1": (Attention(("video",), mask="keys"),),
            "**.attn2": VIDEO_TO_TEXT,
        },
        batched=of_samples("attention_mask", "encoder_attention_mask"),
        common=("image_rotary_emb",),
    ),
    blocks=chained("transformer_blocks"),
)

# This plan replaces that of diffusers, which lists forty blocks by index and gathers three times in each block.
HELIOS = Adapter(
    transformer="HeliosTransformer3DModel",
    pipelines="Helios",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": VIDEO},
            "blocks.*": {
                "temb": Split(dim=1, like="video", ndim=4),
                "rotary_emb": Split(dim=1, like="video"),
                # Tokens of earlier frames come first. Only the last original_context_length tokens attend to text.
                "original_context_length": LastTokens("video"),
            },
        },
        # Gather before the model cuts off the tokens of earlier frames, which come first in the full sequence.
        outputs={"blocks.-1": ALL_VIDEO},
        joint_order=("video",),
        attention={"**.attn2": VIDEO_TO_TEXT},
    ),
    blocks=chained("blocks"),
)

LATTE = Adapter(
    transformer="LatteTransformer3DModel",
    pipelines="Latte",
    plan=Plan(
        inputs={},
        inner={
            # The tokens are [B · F, H · W, C], so dim 1 holds the image tokens of one frame.
            "pos_embed": {0: IMAGE},
            # The temporal blocks get a time step per image token, [B · H · W, C], one sample after the other.
            "temporal_transformer_blocks.*": {"timestep": Split(dim=0, like="image", runs=True)},
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={
            "transformer_blocks.*.attn2": TO_TEXT,
            # Each token attends to the tokens at the same position in all frames, which are on the same rank.
            "temporal_transformer_blocks.*.attn1": (Attention(("frames",)),),
        },
        batched=of_samples("encoder_attention_mask"),
    ),
    # Temporal blocks run between these blocks and are not cached, so they run at every step.
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",)),)),
)

# A mixture of experts in which experts choose their tokens.
NUCLEUS = Adapter(
    transformer="NucleusMoEImageTransformer2DModel",
    pipelines="Nucleus-Image",
    plan=Plan(
        inputs={},
        inner={
            "pos_embed": {0: Split(dim=0, like="image")},
            "transformer_blocks.0": {"hidden_states": IMAGE},
            # attention_kwargs holds a mask: an entry for each image token, then one for each text token.
            "transformer_blocks.*": {"attention_kwargs": Split(dim=1, like="image", then_replicated=True)},
            # Each expert chooses among all image tokens, so gather the inputs, and split the output (0) again.
            "transformer_blocks.*.img_mlp": {
                "hidden_states": ALL_IMAGE,
                "hidden_states_unmodulated": ALL_IMAGE,
                0: Split(dim=1, like="image"),
            },
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"transformer_blocks.*.attn": (Attention(("image",), ("image", "text"), mask="keys"),)},
    ),
    blocks=chained("transformer_blocks"),
)

HUNYUAN_DIT = Adapter(
    transformer="HunyuanDiT2DModel",
    pipelines="HunyuanDiT",
    plan=Plan(
        inputs={"image_rotary_emb": Split(dim=0, like="image"), "controlnet_block_samples": Split(dim=1, like="image")},
        inner={"blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"blocks.*.attn2": TO_TEXT},
        batched=of_samples(
            *("text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"),
            *("image_meta_size", "style", "controlnet_block_samples"),
        ),
        common=("image_rotary_emb",),
    ),
    # Later blocks also get outputs of earlier blocks. chained=True would require the same arguments for all blocks.
    blocks=CachedBlocks((BlockGroup(("blocks",)),), conditions=("encoder_hidden_states", "encoder_hidden_states_t5")),
)
