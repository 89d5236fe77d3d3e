"""Plans of Qwen-Image. Compared with ComfyUI 0.33.0, ``comfy/ldm/qwen_image/model.py``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import FirstTokens, Gather, Plan, Replicate, Split

from .flux import name_controlled_references
from .recorded import RecordedPlan

QWEN_IMAGE = RecordedPlan(
    cls="qwen_image.model.QwenImageTransformer2DModel",
    models="Qwen-Image",
    arguments=("x", "timesteps", "context", "attention_mask", "control", "ref_latents", "ref_latents_method"),
    adapter=Adapter(
        transformer="QwenImageTransformer2DModel",
        pipelines="Qwen-Image in ComfyUI",
        plan=Plan(
            inputs={"control": Split(dim=1, like="image")},
            inner={
                "transformer_blocks.0": {
                    "hidden_states": Split(dim=1, segment="image"),
                    "encoder_hidden_states": Replicate(dim=1, segment="text"),
                },
                "transformer_blocks.*": {
                    "image_rotary_emb": Split(dim=2, like="image", after="text"),
                    # The number of image tokens before those of reference images, which have the timestep 0.
                    "timestep_zero_index": FirstTokens("image"),
                },
            },
            outputs={"norm_out": Gather(dim=1, segment="image")},
            joint_order=("text", "image"),
        ),
        blocks=CachedBlocks(
            (BlockGroup(("transformer_blocks",), ("encoder_hidden_states", "hidden_states")),),
            conditions=("context",),
            uncached=("control",),
        ),
    ),
    refusals=(name_controlled_references,),
)
