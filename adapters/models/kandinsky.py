"""Adapters of Kandinsky 5, Kandinsky 6 (video with sound) and its super-resolution.
Written for diffusers 0.42.

Only video is sharded: by tokens, but in the self-attention of the super-resolution by heads.
Tests: tests/adapters/test_transformers.py (``-k kandinsky``).
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.plans.plan import Attention, AttentionByHeads, Gather, Plan, Split

# Gathered after the blocks, because the models then reshape all tokens to frames, rows and columns.
ALL_VIDEO = Gather(dim=1, segment="video")

KANDINSKY5 = Adapter(
    transformer="Kandinsky5Transformer3DModel",
    pipelines="Kandinsky 5",
    plan=Plan(
        inputs={},
        inner={
            "visual_transformer_blocks.0": {"visual_embed": Split(dim=1, segment="video")},
            "visual_transformer_blocks.*": {"rope": Split(dim=1, like="video")},
        },
        outputs={"visual_transformer_blocks.-1": ALL_VIDEO},
        joint_order=("video",),
        attention={"visual_transformer_blocks.*.cross_attention": (Attention(("video",), ("text",)),)},
        refused={
            "sparse_params": "which keys are attended to is found from means of 64 tokens of the whole video"
        },
    ),
    blocks=chained("visual_transformer_blocks", streams=("visual_embed",), measured="visual_embed"),
)

KANDINSKY6 = Adapter(
    transformer="Kandinsky6Transformer3DModel",
    pipelines="Kandinsky 6",
    plan=Plan(
        inputs={},
        inner={
            "visual_transformer_blocks.0": {"vis": Split(dim=1, segment="video")},
            "visual_transformer_blocks.*": {"vis_rope": Split(dim=0, like="video")},
        },
        outputs={"visual_transformer_blocks.-1": (ALL_VIDEO, None)},
        joint_order=("video",),
        # There are few sound tokens, so they are replicated and computed on every rank.
        attention={
            "**.video_dec_block.cross_attention": (Attention(("video",), ("text",)),),
            "**.audio_dec_block.self_attention": (Attention(("sound",)),),
            "**.audio_dec_block.cross_attention": (Attention(("sound",), ("text",)),),
            "**.va_cross_attention": (Attention(("video",), ("sound",)),),
            "**.av_cross_attention": (Attention(("sound",), ("video",)),),
        },
    ),
    blocks=chained("visual_transformer_blocks", streams=("vis", "aud"), measured="vis"),
)

KANDINSKY6_SR = Adapter(
    transformer="Kandinsky6SRTransformer3DModel",
    pipelines="Kandinsky 6 SR",
    plan=Plan(
        inputs={},
        inner={"visual_transformer_blocks.0": {"hidden_states": Split(dim=1, segment="video")}},
        outputs={"visual_transformer_blocks.-1": ALL_VIDEO},
        joint_order=("video",),
        # Each head chooses its keys by averages of queries and keys over 64 tokens, which needs all tokens.
        # So each rank computes some of the heads, over all tokens.
        attention={
            "**.self_attention": AttentionByHeads(
                "video", ("to_query", "to_key", "to_value"), "out_layer", heads="num_heads"
            )
        },
    ),
    blocks=chained("visual_transformer_blocks"),
)
