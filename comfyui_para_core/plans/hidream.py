"""Plans of HiDream. Compared with ComfyUI 0.33.0, ``comfy/ldm/hidream/model.py``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Split

from .recorded import RecordedPlan

POSITIONS = Split(dim=1, like="image", then_replicated=True)

HIDREAM = RecordedPlan(
    cls="hidream.model.HiDreamImageTransformer2DModel",
    models="HiDream-I1",
    arguments=("x", "t", "y", "context", "encoder_hidden_states_llama3", "image_cond"),
    adapter=Adapter(
        transformer="HiDreamImageTransformer2DModel",
        pipelines="HiDream in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "double_stream_blocks.0": {"image_tokens": Split(dim=1, segment="image")},
                "double_stream_blocks.*": {"rope": POSITIONS},
                "single_stream_blocks.*": {"rope": POSITIONS},
            },
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("image", "text"),
        ),
        blocks=CachedBlocks(
            (
                BlockGroup(
                    ("double_stream_blocks",), ("image_tokens", "text_tokens"), measured="image_tokens"
                ),
                BlockGroup(("single_stream_blocks",), ("image_tokens",), measured="image_tokens"),
            ),
            conditions=("context", "encoder_hidden_states_llama3"),
        ),
    ),
)
