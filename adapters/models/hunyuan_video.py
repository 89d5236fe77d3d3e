"""Adapters of HunyuanVideo (text- and image-to-video), FramePack and HunyuanVideo 1.5.
Written for diffusers 0.42.

In all three text stays whole on every rank, after the video. They differ in where positions and masks are
made. Tests: tests/adapters/test_transformers.py (``-k hunyuan``).
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import JOINT_PROJECTIONS, TEXT_LAST, chained, linears
from para_core.plans.plan import Attention, FirstTokens, Gather, Plan, ShardRule, Split
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import Linear, TensorPlan

VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=0, like="video")
# Text comes last and is replicated, so the masks that the model makes for the full sequence remain correct.
JOINT_ORDER = ("video", "text")
# The number of tokens of the first frame, which image-to-video by token replacement modulates differently.
# Blocks of text-to-video do not have this parameter, and the rule does nothing there.
FIRST_FRAME: dict[str | int, ShardRule] = {"num_tokens": FirstTokens("video")}

# HunyuanVideo and FramePack have the same blocks. HunyuanVideo 1.5 has no single ones, but the names in its
# double blocks and in its refiner are the same; patterns that match nothing are ignored.
_REFINER = "context_embedder.token_refiner.refiner_blocks.*"
HUNYUAN_VIDEO_TENSOR = TensorPlan(
    linears={
        **linears(
            "transformer_blocks.*",
            columns=[
                *(f"attn.{name}" for name in JOINT_PROJECTIONS),
                "ff.net.0.proj",
                "ff_context.net.0.proj",
            ],
            rows=["attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2"],
        ),
        **linears("single_transformer_blocks.*", columns=["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]),
        # proj_out reads attention output, as wide as its own output, then hidden units, whose number follows
        # from mlp_ratio. Each part is sharded separately.
        "single_transformer_blocks.*.proj_out": Linear("rowwise", parts_from="out_features"),
        **linears(
            _REFINER,
            columns=["attn.to_q", "attn.to_k", "attn.to_v", "ff.net.0.proj"],
            rows=["attn.to_out.0", "ff.net.2"],
        ),
    },
    heads=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn", f"{_REFINER}.attn"),
)

HUNYUAN_VIDEO = Adapter(
    transformer="HunyuanVideoTransformer3DModel",
    pipelines="HunyuanVideo",
    plan=Plan(
        inputs={},
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": FIRST_FRAME,
            "single_transformer_blocks.*": FIRST_FRAME,
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=JOINT_ORDER,
    ),
    blocks=chained("transformer_blocks", "single_transformer_blocks", streams=TEXT_LAST),
    tensor=HUNYUAN_VIDEO_TENSOR,
    frames=Frames(dim=2, together="patch_size_t"),
    threshold=0.06,
    # 1324733 is a commit of ParaAttention.
    threshold_source="ParaAttention, doc/fastest_hunyuan_video.md; at 1324733 it was 0.035",
)

FRAMEPACK = Adapter(
    transformer="HunyuanVideoFramepackTransformer3DModel",
    pipelines="HunyuanVideo FramePack",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            # The model calls ``rope`` once for the new frames and once for each resolution of earlier ones,
            # and concatenates the tables. So the whole table is split where a block receives it.
            "transformer_blocks.*": {"freqs_cis": POSITIONS},
            "single_transformer_blocks.*": {"image_rotary_emb": POSITIONS},
        },
        # Gather before the model cuts off the tokens of earlier frames, which come first in the full
        # sequence.
        outputs={"single_transformer_blocks.-1": (Gather(dim=1, segment="video"), None)},
        joint_order=JOINT_ORDER,
    ),
    blocks=chained("transformer_blocks", "single_transformer_blocks", streams=TEXT_LAST),
    tensor=HUNYUAN_VIDEO_TENSOR,
    # No source has a threshold for FramePack. Its blocks are those of HunyuanVideo.
    threshold=HUNYUAN_VIDEO.threshold,
    threshold_source=HUNYUAN_VIDEO.threshold_source,
)

# No source has a threshold for HunyuanVideo 1.5, so it gets the default.
HUNYUAN_VIDEO_15 = Adapter(
    transformer="HunyuanVideo15Transformer3DModel",
    pipelines="HunyuanVideo 1.5",
    plan=Plan(
        inputs={},
        inner={"rope": {0: POSITIONS, 1: POSITIONS}, "transformer_blocks.0": {"hidden_states": VIDEO}},
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=JOINT_ORDER,
        # Each attention makes its mask from the tokens that it has: [B, 1, S_local, S_local], True for two
        # valid ones.
        attention={"transformer_blocks.*.attn": (Attention(JOINT_ORDER, mask="pairs"),)},
    ),
    blocks=chained("transformer_blocks", streams=TEXT_LAST),
    tensor=HUNYUAN_VIDEO_TENSOR,
    # Without ``frames``, because PipeFusion refuses masks of pairs.
)
