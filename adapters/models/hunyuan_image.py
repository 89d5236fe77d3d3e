"""Adapters of HunyuanImage 2.1 and HunyuanDiT (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_LAST, chained, of_samples
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

IMAGE, POSITIONS = Split(dim=1, segment="image"), Split(dim=0, like="image")

HUNYUAN_IMAGE = Adapter(
    transformer="HunyuanImageTransformer2DModel",
    pipelines="HunyuanImage 2.1",
    plan=Plan(
        inputs={},
        inner={"rope": {0: POSITIONS, 1: POSITIONS}, "transformer_blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        # Text comes after the image, as in the attention masks that the model makes for the full sequence.
        joint_order=("image", "text"),
    ),
    blocks=chained(
        "transformer_blocks",
        "single_transformer_blocks",
        streams=TEXT_LAST,
        conditions=("encoder_hidden_states", "encoder_hidden_states_2"),
    ),
)

HUNYUAN_DIT = Adapter(
    transformer="HunyuanDiT2DModel",
    pipelines="HunyuanDiT",
    plan=Plan(
        inputs={"image_rotary_emb": POSITIONS, "controlnet_block_samples": Split(dim=1, like="image")},
        inner={"blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("image",),
        attention={"blocks.*.attn2": (Attention(("image",), ("text",)),)},
        batched=of_samples(
            "text_embedding_mask",
            "encoder_hidden_states_t5",
            "text_embedding_mask_t5",
            "image_meta_size",
            "style",
            "controlnet_block_samples",
        ),
        common=("image_rotary_emb",),
    ),
    # Later blocks also get outputs of earlier blocks (long skip connections). chained=True would require the same
    # arguments for all blocks.
    blocks=CachedBlocks((BlockGroup(("blocks",)),), conditions=("encoder_hidden_states", "encoder_hidden_states_t5")),
)
