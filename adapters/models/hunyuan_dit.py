"""Adapter of HunyuanDiT. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import samples_in_dim_0
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_TO_TEXT
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Plan, Split

HUNYUAN_DIT = Adapter(
    transformer="HunyuanDiT2DModel",
    pipelines="HunyuanDiT",
    plan=Plan(
        inputs={
            "image_rotary_emb": Split(dim=0, like="image"),
            "controlnet_block_samples": Split(dim=1, like="image"),
        },
        inner={"blocks.0": {"hidden_states": IMAGE}},
        outputs={"proj_out": ALL_IMAGE},
        joint_order=("image",),
        attention={"blocks.*.attn2": IMAGE_TO_TEXT},
        batched=samples_in_dim_0(
            *("text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"),
            *("image_meta_size", "style", "controlnet_block_samples"),
        ),
        common=("image_rotary_emb",),
    ),
    # Not chained: later blocks also get outputs of earlier blocks.
    blocks=CachedBlocks(
        (BlockGroup(("blocks",)),), conditions=("encoder_hidden_states", "encoder_hidden_states_t5")
    ),
)
