"""Adapter of HiDream-I1 (text-to-image). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, ShardRule, Split

# Rule for tensors whose dim 1 has the entries of the image tokens first, then those of the replicated text tokens.
WITH_TEXT = Split(dim=1, like="image", then_replicated=True)
OF_BLOCKS: dict[str | int, ShardRule] = {"hidden_states_masks": WITH_TEXT, "image_rotary_emb": WITH_TEXT}

HIDREAM = Adapter(
    transformer="HiDreamImageTransformer2DModel",
    pipelines="HiDream-I1",
    plan=Plan(
        inputs={},
        inner={
            "double_stream_blocks.0": {"hidden_states": Split(dim=1, segment="image")},
            "double_stream_blocks.*": OF_BLOCKS,
            "single_stream_blocks.*": OF_BLOCKS,
        },
        outputs={"final_layer": Gather(dim=1, segment="image")},
        joint_order=("image", "text"),
        batched={
            "hidden_states": 0,
            "timesteps": 0,
            "encoder_hidden_states_t5": 0,
            "encoder_hidden_states_llama3": 1,
            "pooled_embeds": 0,
            "img_ids": 0,
            "img_sizes": 0,
            "hidden_states_masks": 0,
            "attention_kwargs": 0,
        },
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("double_stream_blocks",), ("hidden_states", "encoder_hidden_states")),
            BlockGroup(("single_stream_blocks",)),
        ),
        conditions=("encoder_hidden_states_t5", "encoder_hidden_states_llama3", "pooled_embeds"),
    ),
)
