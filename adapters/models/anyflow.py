"""Adapters of AnyFlow. Written for diffusers 0.42."""

from dataclasses import replace

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import VIDEO_TO_TEXT
from para_core.adapters.models.shared.wan import (
    CACHED_SELF_ATTENTION,
    STORED_KEYS,
    WITH_VIDEO,
    wan_plan,
    wan_tensor_plan,
)
from para_core.plans.plan import Split

ANYFLOW = Adapter(
    transformer="AnyFlowTransformer3DModel",
    pipelines="AnyFlow",
    plan=wan_plan(
        inner={
            # rotary_emb holds two tensors [1, 1, S, D / 2], one for queries and one for keys.
            "blocks.*": {"rotary_emb": Split(dim=2, like="video"), "temb": WITH_VIDEO},
        },
        attention={"**.attn2": VIDEO_TO_TEXT},
    ),
    blocks=chained("blocks"),
    tensor=wan_tensor_plan("blocks"),
)

ANYFLOW_FAR = Adapter(
    transformer="AnyFlowFARTransformer3DModel",
    pipelines="AnyFlow FAR",
    uncached=STORED_KEYS,
    plan=wan_plan(
        inner={"blocks.*": {"temb": WITH_VIDEO}},
        # kv_cache holds keys and values of earlier chunks, [2, B, H, S, D]. Each rank stores only its heads.
        attention={
            "**.attn1": replace(CACHED_SELF_ATTENTION, caches=(("kv_cache", 2),)),
            "**.attn2": VIDEO_TO_TEXT,
        },
    ),
    # No ``blocks``, so First Block Cache is refused: a skipped block would store no keys for later chunks.
)
