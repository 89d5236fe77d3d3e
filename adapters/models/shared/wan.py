"""Plans that the relatives of Wan share: one that splits their video tokens, the tensor plan of their blocks, and what
the causal ones say of their self-attention. The adapters are in ``adapters/models``: the files that import this
one. Wan itself and ChronoEdit use only the tensor plan: diffusers has a plan of their tokens. Tests:
tests/adapters/test_transformers.py, tests/weights/test_tensor.py.
"""

from collections.abc import Mapping

from para_core.adapters.models.shared.constructors import linears
from para_core.adapters.models.shared.tokens import VIDEO
from para_core.plans.plan import AttentionByHeads, AttentionRule, Gather, Plan, ShardRule, Split
from para_core.weights.tensor_plan import TensorPlan

# Split like the video tokens, along dim 1.
WITH_VIDEO = Split(dim=1, like="video")


def wan_tensor_plan(*lists: str) -> TensorPlan:
    """Return the tensor plan for the blocks of the module lists ``lists``.

    The norms of queries and keys span the channels of all heads, so their weights are sharded with the heads.
    A name that matches no module is ignored, because most relatives have no conditioning image. A misspelt one
    would be, too: the tests compare each relative with the whole model.
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
        norms=tuple(
            f"{block}.{name}" for block in blocks for name in ("*.norm_q", "*.norm_k", "attn2.norm_added_k")
        ),
    )


def wan_plan(
    inner: Mapping[str, Mapping[str | int, ShardRule]],
    attention: Mapping[str, AttentionRule],
    gathered: str = "blocks.-1",
) -> Plan:
    """Return the plan of a relative of Wan, with the video tokens split at block 0.

    The output of the module ``gathered`` is gathered. The default is for models whose output layers apply a
    time step to each token of the full sequence. Others name their last layer, which then runs on a part of the
    tokens. The arguments ``inner`` and ``attention`` are further entries of :class:`Plan`.

    Raises:
        TypeError: ``inner`` has ``"blocks.0"``, whose rule is this function's.
    """
    return Plan(
        inputs={},
        # Unlike a dict display, dict() refuses a second entry of this name.
        inner=dict(**inner, **{"blocks.0": {"hidden_states": VIDEO}}),
        outputs={gathered: Gather(dim=1, segment="video")},
        joint_order=("video",),
        attention=attention,
    )


# The self-attention of the causal AnyFlow and of Wan Animate 2 packs or pads all tokens to fit a mask of flex
# attention, and caches keys for later calls. So each rank runs it on all tokens and some heads. The all-to-all
# comes after the norms, which span all heads. If diffusers renames one of these modules, the cases "wan animate 2"
# and "anyflow far" of tests/adapters/test_transformers.py fail.
CACHED_SELF_ATTENTION = AttentionByHeads("video", ("norm_q", "norm_k", "to_v"), "to_out.0")

# Why First Block Cache refuses them (Adapter.uncached).
STORED_KEYS = "its blocks store keys that later calls read, and a block that is skipped stores none"
