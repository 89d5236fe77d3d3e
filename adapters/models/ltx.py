"""Adapters of LTX-Video and LTX-2 (video with sound). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, ShardRule, Split
from para_core.weights.tensor_plan import COLUMNS, ROWS, TensorPlan

# Rotary embeddings are [B, S, D] or [B, H, S, D / 2]: dim -2 is right for both.
POSITIONS: dict[str | int, ShardRule] = {0: Split(dim=-2, like="video"), 1: Split(dim=-2, like="video")}
VIDEO, TEXT = Split(dim=1, segment="video", ndim=3), Split(dim=1, segment="text", ndim=3)
# The time step is [B], or [B, S] if the user gives some frames. The plan that diffusers publishes does not split it.
TIMESTEP = Split(dim=1, like="video", ndim=2)

# The norms of queries and keys span the channels of all heads. So tensor parallelism shards their weights, and the
# channels of the rotary embedding, in the same way as the heads.
TENSOR = TensorPlan(
    linears={
        **dict.fromkeys(
            (f"transformer_blocks.*.{attn}.{name}" for attn in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v")),
            COLUMNS,
        ),
        "transformer_blocks.*.attn1.to_out.0": ROWS,
        "transformer_blocks.*.attn2.to_out.0": ROWS,
        "transformer_blocks.*.ff.net.0.proj": COLUMNS,
        "transformer_blocks.*.ff.net.2": ROWS,
    },
    heads=("transformer_blocks.*.attn1", "transformer_blocks.*.attn2"),
    norms=("transformer_blocks.*.*.norm_q", "transformer_blocks.*.*.norm_k"),
    positions={"rope": -1},
)

LTX = Adapter(
    transformer="LTXVideoTransformer3DModel",
    pipelines="LTX-Video",
    plan=Plan(
        inputs={
            "hidden_states": VIDEO,
            "encoder_hidden_states": TEXT,
            "encoder_attention_mask": Split(dim=1, like="text", ndim=2),
            "timestep": TIMESTEP,
        },
        inner={"rope": POSITIONS},
        outputs={"": Gather(dim=1, segment="video")},
        joint_order=("video",),
        attention={"**.attn2": (Attention(("video",), ("text",)),)},
        batched=dict.fromkeys(
            (
                "hidden_states",
                "encoder_hidden_states",
                "timestep",
                "encoder_attention_mask",
                "video_coords",
                "attention_kwargs",
            ),
            0,
        ),
        common=("rope_interpolation_scale",),
    ),
    # Replicated text is the faster default, because cross-attention to replicated keys needs no communication.
    text="replicate",
    blocks=CachedBlocks((BlockGroup(("transformer_blocks",), chained=True),)),
    tensor=TENSOR,
)

LTX2 = Adapter(
    transformer="LTX2VideoTransformer3DModel",
    pipelines="LTX-2",
    plan=Plan(
        inputs={
            "hidden_states": VIDEO,
            "timestep": TIMESTEP,
            "video_keyframes_mask": Split(dim=1, like="video"),
            # This mask is [B, S, S]. It is split over keys, because the attention processor expects as many columns as
            # this rank has keys.
            "video_self_attention_mask": Split(dim=-1, like="video"),
        },
        inner={"rope": POSITIONS, "cross_attn_rope": POSITIONS},
        outputs={"": (Gather(dim=1, segment="video"), None)},
        joint_order=("video",),
        # There are few sound tokens, so they are replicated and computed on every rank.
        attention={
            "**.attn1": (Attention(("video",), mask="keys"),),
            "**.attn2": (Attention(("video",), ("text",)),),
            "**.audio_attn1": (Attention(("sound",)),),
            "**.audio_attn2": (Attention(("sound",), ("text",)),),
            "**.audio_to_video_attn": (Attention(("video",), ("sound",)),),
            "**.video_to_audio_attn": (Attention(("sound",), ("video",)),),
        },
        batched=dict.fromkeys(
            (
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "timestep",
                "sigma",
                "video_coords",
                "video_self_attention_mask",
                "video_keyframes_mask",
                "audio_hidden_states",
                "audio_encoder_hidden_states",
                "audio_encoder_attention_mask",
                "audio_timestep",
                "audio_sigma",
                "audio_coords",
                "perturbation_mask",
                "attention_kwargs",
            ),
            0,
        ),
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(
                ("transformer_blocks",),
                ("hidden_states", "audio_hidden_states"),
                chained=True,
                # Each of these arguments perturbs only some blocks, so the blocks do not all compute the same.
                between=("perturbation_mask", "spatio_temporal_guidance_blocks"),
            ),
        ),
        conditions=("encoder_hidden_states", "audio_encoder_hidden_states"),
    ),
)
