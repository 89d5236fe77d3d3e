"""Adapters of LTX-Video and LTX-2 (video with sound). Written for diffusers 0.42.

The video attends to text, and to sound, by cross-attention. Text can be sharded in LTX-Video only; sound is
never. Tests: tests/adapters/test_transformers.py (``-k ltx``).
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, linears, samples_in_dim_0
from para_core.plans.plan import Attention, Gather, Plan, ShardRule, Split
from para_core.weights.tensor_plan import TensorPlan

# Rotary embeddings are [B, S, D] or [B, H, S, D / 2]: dim -2 is right for both.
POSITIONS: dict[str | int, ShardRule] = {0: Split(dim=-2, like="video"), 1: Split(dim=-2, like="video")}
VIDEO, TEXT = Split(dim=1, segment="video", ndim=3), Split(dim=1, segment="text", ndim=3)
# The time step is [B], or [B, S] if the user gives some frames. The plan of diffusers does not split it.
TIMESTEP = Split(dim=1, like="video", ndim=2)

# The norms of queries and keys span the channels of all heads. So tensor parallelism shards their weights,
# and the channels of the rotary embedding, in the same way as the heads.
LTX_TENSOR = TensorPlan(
    linears=linears(
        "transformer_blocks.*",
        columns=[*(f"{attn}.to_{x}" for attn in ("attn1", "attn2") for x in "qkv"), "ff.net.0.proj"],
        rows=["attn1.to_out.0", "attn2.to_out.0", "ff.net.2"],
    ),
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
        batched=samples_in_dim_0("encoder_attention_mask", "video_coords", "attention_kwargs"),
        common=("rope_interpolation_scale",),
    ),
    # The faster default: cross-attention to replicated keys needs no communication.
    text="replicate",
    blocks=chained("transformer_blocks"),
    tensor=LTX_TENSOR,
)

LTX2 = Adapter(
    transformer="LTX2VideoTransformer3DModel",
    pipelines="LTX-2",
    plan=Plan(
        inputs={
            "hidden_states": VIDEO,
            "timestep": TIMESTEP,
            "video_keyframes_mask": Split(dim=1, like="video"),
            # [B, S, S], split over keys: the attention processor expects a column for each key of this rank.
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
        batched=samples_in_dim_0(
            *(
                "encoder_attention_mask",
                "sigma",
                "video_coords",
                "video_self_attention_mask",
                "video_keyframes_mask",
            ),
            *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
            *("audio_timestep", "audio_sigma", "audio_coords", "perturbation_mask", "attention_kwargs"),
        ),
    ),
    blocks=chained(
        "transformer_blocks",
        streams=("hidden_states", "audio_hidden_states"),
        # Each of these arguments perturbs only some blocks, so the blocks do not all compute the same.
        between=("perturbation_mask", "spatio_temporal_guidance_blocks"),
        conditions=("encoder_hidden_states", "audio_encoder_hidden_states"),
    ),
)
