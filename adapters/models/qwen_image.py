"""Qwen-Image: text-to-image, editing, inpainting, layers, ControlNet. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import CachedBlocks, Stage
from para_core.plans.plan import Gather, Plan, Split

QWEN_IMAGE = Adapter(
    transformer="QwenImageTransformer2DModel",
    pipelines="Qwen-Image",
    plan=Plan(
        # [B, S, C] each, added to the image tokens between blocks; the published plan leaves them out.
        inputs={"controlnet_block_samples": Split(dim=1, like="image")},
        inner={
            "pos_embed": {0: Split(dim=0, like="image"), 1: Split(dim=0, like="text")},
            "transformer_blocks.0": {
                "hidden_states": Split(dim=1, segment="image"),
                "encoder_hidden_states": Split(dim=1, segment="text"),
            },
            # The processor makes of it a mask of the keys that this rank holds.
            "transformer_blocks.*": {
                "encoder_hidden_states_mask": Split(dim=1, like="text"),
                "modulate_index": Split(dim=1, like="image"),
            },
        },
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
    ),
    blocks=CachedBlocks(
        (
            Stage(
                ("transformer_blocks",),
                ("encoder_hidden_states", "hidden_states"),
                chained=True,
                between=("controlnet_block_samples",),
            ),
        )
    ),
)
