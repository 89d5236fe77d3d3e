"""Plans of Lumina 2 and Z-Image, which are one class. Compared with ComfyUI 0.33.0, ``comfy/ldm/lumina/model.py``."""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Split

from .recorded import RecordedPlan

LUMINA = RecordedPlan(
    cls="lumina.model.NextDiT",
    models="Lumina 2 and Z-Image",
    # The model does not use its attention mask.
    arguments=("x", "timesteps", "context", "num_tokens", "attention_mask"),
    adapter=Adapter(
        transformer="NextDiT",
        pipelines="Lumina 2 and Z-Image in ComfyUI",
        plan=Plan(
            inputs={},
            # Text and image tokens are one tensor. The blocks before, which refine each, run on every rank.
            inner={
                "layers.0": {"x": Split(dim=1, segment="tokens")},
                "layers.*": {"freqs_cis": Split(dim=1, like="tokens")},
            },
            outputs={"layers.-1": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("layers",), ("x",), "x"),), conditions=("context",)),
    ),
)
