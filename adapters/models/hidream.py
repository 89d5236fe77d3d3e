"""Adapter of HiDream-I1. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_THEN_TEXT
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Plan, ShardRule, Split

# Rule for tensors with entries along dim 1 for image tokens first, then for replicated text tokens.
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
