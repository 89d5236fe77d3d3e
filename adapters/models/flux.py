"""Adapters of FLUX.1 with all its pipelines, FLUX.2 and FLUX.3. Written for diffusers 0.42.

The plan of FLUX.1 is in ``shared/flux.py``, because other families use it, too.
Tests: tests/adapters/test_transformers.py (``-k flux``).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_FIRST, chained
from para_core.adapters.models.shared.flux import FLUX_PLAN, IMAGE, INPUTS, TEXT
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split


def _modulated(block: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """Return what block 0 computes first, the modulated norm of the image tokens: see ``CachedBlocks.modulated``."""
    norm: Any = block.norm1
    modulated: Tensor = norm(arguments["hidden_states"], emb=arguments["temb"])[0]
    return modulated


FLUX = Adapter(
    transformer="FluxTransformer2DModel",
    pipelines="FLUX.1: every pipeline on FluxTransformer2DModel",
    plan=FLUX_PLAN,
    blocks=chained(
        "transformer_blocks",
        "single_transformer_blocks",
        streams=TEXT_FIRST,
        between=("controlnet_block_samples", "controlnet_single_block_samples"),
        conditions=("encoder_hidden_states", "pooled_projections"),
        modulated=_modulated,
    ),
    threshold=0.08,
    threshold_source="ParaAttention, doc/fastest_flux.md",
)

FLUX2 = Adapter(
    transformer="Flux2Transformer2DModel",
    pipelines="FLUX.2",
    plan=Plan(
        inputs=INPUTS,
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
        refused={
            # The first step passes this argument alone, and the later ones both.
            "kv_cache_mode": "reference images then attend to themselves only, and later steps attend to their keys, "
            "which the plan does not describe (a Flux2KleinPipeline takes reference images without it)",
            "kv_cache": "it holds the keys of full reference images, by their positions in the full sequence",
        },
    ),
    blocks=CachedBlocks(
        (
            BlockGroup(("transformer_blocks",), TEXT_FIRST, chained=True),
            # The single blocks take text and image tokens as one tensor, which alone is compared and stored.
            BlockGroup(("single_transformer_blocks",), chained=True),
        ),
        # With these each block stores its keys for later steps, or reads them, so no block may be skipped.
        uncached=("kv_cache_mode", "kv_cache"),
    ),
)

FLUX3 = Adapter(
    transformer="Flux3Transformer2DModel",
    pipelines="FLUX.3",
    plan=Plan(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            "img_ids": Split(dim=0, like="image"),
            "txt_ids": Split(dim=0, like="text"),
            "image_cond_hidden_states": Split(dim=1, segment="condition"),
            "image_cond_ids": Split(dim=0, like="condition"),
        },
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image", "condition"),
        # Before the joint blocks, the tokens of each segment attend only to each other, in its own blocks.
        attention={
            "txt_mode_blocks.*.attn": (Attention(("text",)),),
            "mode_blocks.image.*.attn": (Attention(("image",)),),
            "mode_blocks.image_cond.*.attn": (Attention(("condition",)),),
        },
    ),
    blocks=chained("single_transformer_blocks", streams=TEXT_FIRST),
)
