"""Adapters of Wan Animate 1 and 2. Written for diffusers 0.42.

The first is Wan with a face adapter after some blocks; the second stores the keys of a reference image. What
they share with Wan is in ``shared/wan.py``. Tests: tests/adapters/test_transformers.py
(``-k "wan and animate"``), tests/weights/test_tensor.py.
"""

from dataclasses import replace

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.tokens import VIDEO_TO_TEXT
from para_core.adapters.models.shared.wan import (
    CACHED_SELF_ATTENTION,
    STORED_KEYS,
    WITH_VIDEO,
    wan_plan,
    wan_tensor_plan,
)
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather
from para_core.weights.tensor_plan import COLUMNS, ROWS

_TENSOR = wan_tensor_plan("blocks")
# Each block of the face adapter has its own heads, which attend to face tokens. It normalizes each head
# separately, so the weights of its norms are not sharded.
_ADAPTER = "face_adapter.*"
_TENSOR_WITH_FACES = replace(
    _TENSOR,
    linears={
        **_TENSOR.linears,
        **dict.fromkeys((f"{_ADAPTER}.{name}" for name in ("to_q", "to_k", "to_v")), COLUMNS),
        f"{_ADAPTER}.to_out": ROWS,
    },
    heads=(*_TENSOR.heads, _ADAPTER),
)

WAN_ANIMATE = Adapter(
    transformer="WanAnimateTransformer3DModel",
    pipelines="Wan Animate",
    plan=wan_plan(
        inner={
            "rope": {0: WITH_VIDEO, 1: WITH_VIDEO},
            # The video tokens of a frame, perhaps on two ranks, attend to the face in it, so gather them.
            "face_adapter.*": {"hidden_states": Gather(dim=1, segment="video"), 0: WITH_VIDEO},
        },
        gathered="proj_out",
        attention={"**.attn2": VIDEO_TO_TEXT, "face_adapter.*": (Attention(("frame",), ("face",)),)},
    ),
    # The face adapter runs between some blocks. chained=True would require that nothing runs between blocks.
    blocks=CachedBlocks((BlockGroup(("blocks",)),)),
    tensor=_TENSOR_WITH_FACES,
)

WAN_ANIMATE_2 = Adapter(
    transformer="WanAnimate2Transformer3DModel",
    pipelines="Wan Animate 2",
    uncached=STORED_KEYS,
    fills=("kv_cache_mode", "extract"),
    plan=wan_plan(
        inner={},
        # Gather after the head: a model of ten blocks skips its last block in unconditional calls.
        gathered="head",
        # The module caches the keys of the reference image. Each rank caches only its heads.
        attention={"**.self_attn": CACHED_SELF_ATTENTION, "**.cross_attn": VIDEO_TO_TEXT},
    ),
)
