"""Adapters of Wan, ChronoEdit, VACE, Animate 1 and 2, SkyReels V2 and AnyFlow. Written for diffusers 0.42."""

from collections.abc import Mapping
from dataclasses import replace

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, linears
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attending, Attention, AttentionByHeads, Gather, Plan, ShardRule, Split
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import COLUMNS, ROWS, TensorPlan

VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=1, like="video")
# The keys of cross-attention are text tokens and tokens of a conditioning image, all replicated.
TO_TEXT = (Attention(("video",), ("text",)),)

BLOCKS = chained("blocks")


def _tensor(*lists: str) -> TensorPlan:
    """Return the tensor plan for the blocks of the module lists ``lists``.

    The norms of queries and keys span the channels of all heads, so their weights are sharded with the heads.
    """
    blocks = [f"{name}.*" for name in lists]
    heads = ("attn1", "attn2")
    # add_k_proj and add_v_proj compute the keys and values of conditioning image tokens.
    columns = [f"{attn}.to_{x}" for attn in heads for x in "qkv"]
    return TensorPlan(
        linears=linears(
            *blocks,
            columns=[*columns, "ffn.net.0.proj", "attn2.add_k_proj", "attn2.add_v_proj"],
            rows=["attn1.to_out.0", "attn2.to_out.0", "ffn.net.2"],
        ),
        heads=tuple(f"{block}.{attn}" for block in blocks for attn in heads),
        norms=tuple(f"{block}.{name}" for block in blocks for name in ("*.norm_q", "*.norm_k", "attn2.norm_added_k")),
    )


def _plan(
    inner: Mapping[str, Mapping[str | int, ShardRule]],
    attention: Mapping[str, Attending],
    gathered: str = "blocks.-1",
) -> Plan:
    """Return a plan that splits the video tokens at block 0 and gathers the output of the module ``gathered``.

    The default is for models whose output layers apply a time step to each token of the full sequence. The arguments
    ``inner`` and ``attention`` are further entries of :class:`Plan`.
    """
    return Plan(
        inputs={},
        inner={**inner, "blocks.0": {"hidden_states": VIDEO}},
        outputs={gathered: Gather(dim=1, segment="video")},
        joint_order=("video",),
        attention=attention,
    )


TENSOR = _tensor("blocks")
# Each block of the face adapter has its own heads, which attend to face tokens. It normalizes each head separately, so
# the weights of its norms are not sharded.
_ADAPTER = "face_adapter.*"
TENSOR_WITH_FACES = replace(
    TENSOR,
    linears={
        **TENSOR.linears,
        **dict.fromkeys((f"{_ADAPTER}.{name}" for name in ("to_q", "to_k", "to_v")), COLUMNS),
        f"{_ADAPTER}.to_out": ROWS,
    },
    heads=(*TENSOR.heads, _ADAPTER),
)

FRAMES = Frames(dim=2, together="patch_size")

WAN = Adapter(transformer="WanTransformer3DModel", pipelines="Wan", blocks=BLOCKS, tensor=TENSOR, frames=FRAMES)
CHRONO_EDIT = Adapter(
    transformer="ChronoEditTransformer3DModel", pipelines="ChronoEdit", blocks=BLOCKS, tensor=TENSOR, frames=FRAMES
)

WAN_VACE = Adapter(
    transformer="WanVACETransformer3DModel",
    pipelines="Wan VACE",
    plan=_plan(
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            # Every VACE block gets the video tokens that enter the first block, so split them for each VACE block.
            "vace_blocks.*": {"hidden_states": VIDEO},
            "vace_blocks.0": {"control_hidden_states": Split(dim=1, like="video")},
        },
        gathered="proj_out",
        attention={"**.attn2": TO_TEXT},
    ),
    # The VACE blocks run before these blocks and are not cached, so they run at every step.
    blocks=CachedBlocks((BlockGroup(("blocks",)),)),
    tensor=_tensor("blocks", "vace_blocks"),
)

WAN_ANIMATE = Adapter(
    transformer="WanAnimateTransformer3DModel",
    pipelines="Wan Animate",
    plan=_plan(
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            # The video tokens of a frame, perhaps on two ranks, attend to the face in that frame, so gather them.
            "face_adapter.*": {"hidden_states": Gather(dim=1, segment="video"), 0: POSITIONS},
        },
        gathered="proj_out",
        attention={"**.attn2": TO_TEXT, "face_adapter.*": (Attention(("frame",), ("face",)),)},
    ),
    # The face adapter runs between some blocks. chained=True would require that nothing runs between blocks.
    blocks=CachedBlocks((BlockGroup(("blocks",)),)),
    tensor=TENSOR_WITH_FACES,
)

SKYREELS_V2 = Adapter(
    transformer="SkyReelsV2Transformer3DModel",
    pipelines="SkyReels V2",
    plan=_plan(
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            # temb has one entry per token if frames have different time steps. The causal mask is replicated.
            "blocks.*": {"temb": Split(dim=2, like="video", ndim=4)},
        },
        attention={"**.attn2": TO_TEXT},
    ),
    blocks=BLOCKS,
    tensor=TENSOR,
    steps_with_copies=True,
)

ANYFLOW = Adapter(
    transformer="AnyFlowTransformer3DModel",
    pipelines="AnyFlow",
    plan=_plan(
        inner={
            # rotary_emb holds two tensors [1, 1, S, D / 2], one for queries and one for keys.
            "blocks.*": {"rotary_emb": Split(dim=2, like="video"), "temb": POSITIONS},
        },
        attention={"**.attn2": TO_TEXT},
    ),
    blocks=BLOCKS,
    tensor=TENSOR,
)

# This self-attention packs or pads all tokens to fit a mask of flex attention, and caches keys for later calls. So each
# rank runs it on all tokens and some heads. The all-to-all comes after the norms, which span all heads.
_BY_HEADS = AttentionByHeads("video", ("norm_q", "norm_k", "to_v"), "to_out.0")

_WRITES_KEYS = "its blocks store keys that later calls read, and a block that is skipped stores none"

ANYFLOW_FAR = Adapter(
    transformer="AnyFlowFARTransformer3DModel",
    pipelines="AnyFlow FAR",
    uncached=_WRITES_KEYS,
    plan=_plan(
        inner={"blocks.*": {"temb": POSITIONS}},
        # kv_cache holds keys and values of earlier chunks, [2, B, H, S, D]. Each rank stores only its heads.
        attention={"**.attn1": replace(_BY_HEADS, caches=(("kv_cache", 2),)), "**.attn2": TO_TEXT},
    ),
    # No ``blocks``, so First Block Cache is refused: a skipped block would store no keys for later chunks.
)

WAN_ANIMATE_2 = Adapter(
    transformer="WanAnimate2Transformer3DModel",
    pipelines="Wan Animate 2",
    uncached=_WRITES_KEYS,
    fills=("kv_cache_mode", "extract"),
    plan=_plan(
        inner={},
        # Gather after the head: a model of ten blocks skips its last block in unconditional calls.
        gathered="head",
        # The module caches the keys of the reference image. Each rank caches only its heads.
        attention={"**.self_attn": _BY_HEADS, "**.cross_attn": TO_TEXT},
    ),
)
