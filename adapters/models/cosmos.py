"""Adapters of Cosmos 1, 2, 2.5 (predict and transfer) and Cosmos 3. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.plans.plan import Attention, Entries, Gather, Plan, Split

VIDEO, WITH_VIDEO, POSITIONS = (
    Split(dim=1, segment="video"),
    Split(dim=1, like="video"),
    Split(dim=0, like="video"),
)
# The time-step embedding is [B, C], or [B, S, C] if the user gives some frames. Only the latter is split.
TIME = Split(dim=1, like="video", ndim=3)

COSMOS = Adapter(
    transformer="CosmosTransformer3DModel",
    pipelines="Cosmos 1, 2 and 2.5",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": VIDEO},
            "transformer_blocks.*": {
                "embedded_timestep": TIME,
                "temb": TIME,
                "image_rotary_emb": POSITIONS,
                "extra_pos_emb": WITH_VIDEO,
                "controlnet_residual": WITH_VIDEO,
            },
        },
        # Gather before the output layers, which apply a time step to each token of the full sequence.
        outputs={"transformer_blocks.-1": Gather(dim=1, segment="video")},
        joint_order=("video",),
        # attn2 is cross-attention to replicated text tokens, and in Cosmos 2.5 also to image tokens.
        attention={"**.attn2": (Attention(("video",), ("text",)),)},
    ),
    blocks=chained("transformer_blocks", between=("block_controlnet_hidden_states",)),
)

COSMOS3 = Adapter(
    transformer="Cosmos3OmniTransformer",
    pipelines="Cosmos 3",
    plan=Plan(
        inputs={},
        # The tensors are [S, C], without a batch dim. Text tokens (und_seq) are replicated; video, sound and
        # action tokens (gen_seq) are one sharded segment.
        inner={
            "layers.0": {"gen_seq": Split(dim=0, segment="video")},
            "layers.*": {"rotary_emb": Entries((None, None, POSITIONS, POSITIONS))},
        },
        outputs={"norm_moe_gen": Gather(dim=0, segment="video")},
        joint_order=("text", "video"),
        attention={
            "layers.*.self_attn": (Attention(("text",)), Attention(("video",), ("text", "video"))),
        },
    ),
    blocks=chained("layers", streams=("und_seq", "gen_seq"), measured="gen_seq", conditions=("input_ids",)),
)
