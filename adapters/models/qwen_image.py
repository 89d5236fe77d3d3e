"""Adapters of Qwen-Image, also for editing and with ControlNet, and Qwen-Image 2.1.
Written for diffusers 0.42.

The second model has little of the first: the prompt and the input images come before the generated image in
one sequence, stay whole on every rank, and attend piece by piece.
Tests: tests/adapters/test_transformers.py (``-k qwen``).
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_FIRST, chained
from para_core.plans.plan import Attention, Count, Gather, OneForEach, Plan, Split

QWEN_IMAGE = Adapter(
    transformer="QwenImageTransformer2DModel",
    pipelines="Qwen-Image",
    plan=Plan(
        # ControlNet residuals [B, S, C], which the model adds to the image tokens between blocks. The plan
        # that diffusers publishes does not split them.
        inputs={"controlnet_block_samples": Split(dim=1, like="image")},
        inner={
            "pos_embed": {0: Split(dim=0, like="image"), 1: Split(dim=0, like="text")},
            "transformer_blocks.0": {
                "hidden_states": Split(dim=1, segment="image"),
                "encoder_hidden_states": Split(dim=1, segment="text"),
            },
            # The processor makes a mask from encoder_hidden_states_mask for the keys that it gets, this
            # rank's.
            "transformer_blocks.*": {
                "encoder_hidden_states_mask": Split(dim=1, like="text"),
                "modulate_index": Split(dim=1, like="image"),
            },
        },
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
    ),
    blocks=chained("transformer_blocks", streams=TEXT_FIRST, between=("controlnet_block_samples",)),
    # The model views the rotary embedding of the text as complex numbers, which fails without text tokens. So
    # every patch of PipeFusion carries the text.
    empty_text=False,
)

# Rule for tensors with the replicated tokens of prompt and input images before those of the result.
_LAST = Split(dim=0, like="image", after_replicated=True)

QWEN_IMAGE_21 = Adapter(
    transformer="QwenImage21Transformer2DModel",
    pipelines="Qwen-Image 2.1",
    plan=Plan(
        # The last entry is (frames, height, width) of the generated image, in tokens.
        inputs={"img_shapes": Count("image", at=(0, -1))},
        inner={
            "transformer_blocks.0": {"hidden_states": Split(dim=1, segment="image", after_replicated=True)},
            "transformer_blocks.*": {"rotary_emb": _LAST, "target_token_mask": _LAST},
            "norm_out": {"target_token_mask": _LAST},
        },
        outputs={"proj_out": Gather(dim=1, segment="image", after_replicated=True)},
        joint_order=("prompt", "image"),
        attention={
            # The module computes the prompt in pieces. A piece attends to itself and to earlier pieces. Every
            # rank computes all pieces and caches their keys.
            "transformer_blocks.*.attn": OneForEach(
                "segments",
                each=Attention(("piece",), ("prompt",)),
                last=Attention(("image",), ("prompt", "image")),
            )
        },
    ),
    # With kv_cache each block stores its keys in the cache, so no block may be skipped.
    blocks=chained("transformer_blocks", uncached=("kv_cache",)),
)
