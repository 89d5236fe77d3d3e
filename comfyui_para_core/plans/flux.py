"""Plans of FLUX.1, FLUX.2, Chroma and Chroma Radiance. Compared with ComfyUI 0.33.0.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them, only the functions here (tests/comfyui/test_pack.py). See `plans/__init__.py`, which finds them here.
Qwen-Image and HunyuanVideo take parts of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Gather, Plan, Replicate, Split

from .recorded import RecordedPlan

# The rotary table pe is [B, 1, S, D / 2, 2, 2] for the tokens of text and image, in this order. Every rank
# keeps the entries of the text, which it has whole, and takes those of its image tokens.
_POSITIONS = Split(dim=2, like="image", after="text")
# Shared with hunyuan_video.py.
DOUBLE_AND_SINGLE = Plan(
    # Residuals of a ControlNet: lists of [B, S, C] or None, by the kind of block.
    inputs={"control": Split(dim=1, like="image")},
    inner={
        # Tokens are split before the first block. Each block gets them from the one before, on every rank its
        # own. Replicate splits nothing: it tells how many text tokens each rank has.
        "double_blocks.0": {"img": Split(dim=1, segment="image"), "txt": Replicate(dim=1, segment="text")},
        "double_blocks.*": {"pe": _POSITIONS},
        "single_blocks.*": {"pe": _POSITIONS},
    },
    outputs={"final_layer": Gather(dim=1, segment="image")},
    joint_order=("text", "image"),
)
# Shared with hunyuan_video.py.
BLOCKS = CachedBlocks(
    (
        BlockGroup(("double_blocks",), ("img", "txt"), measured="img"),
        BlockGroup(("single_blocks",), ("x",), measured="x"),
    ),
    conditions=("context",),
    # The model adds residuals to the tokens between blocks, also if the blocks are skipped.
    uncached=("control",),
)


def _name_times_of_references(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Name reference images with a timestep of their own, which the blocks look up by the number of a token."""
    parameters: Any = model.params
    method = arguments.get("ref_latents_method", parameters.default_ref_method)
    own_time = bool(arguments.get("ref_latents")) and method == "index_timestep_zero"
    return "reference images by the method index_timestep_zero" if own_time else ""


def name_controlled_references(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Name a ControlNet together with reference images. Shared with qwen_image.py.

    Its residuals have no rows for the tokens of references, so the plan would cut them wrongly.
    """
    both = bool(arguments.get("ref_latents")) and arguments.get("control") is not None
    return "reference images together with a ControlNet" if both else ""


FLUX = RecordedPlan(
    cls="flux.model.Flux",
    models="FLUX.1 and FLUX.2",
    arguments=("x", "timestep", "context", "y", "guidance", "control", "ref_latents", "ref_latents_method"),
    adapter=Adapter(transformer="Flux", pipelines="FLUX in ComfyUI", plan=DOUBLE_AND_SINGLE, blocks=BLOCKS),
    refusals=(_name_times_of_references, name_controlled_references),
)

CHROMA = RecordedPlan(
    cls="chroma.model.Chroma",
    models="Chroma",
    arguments=("x", "timestep", "context", "guidance", "control"),
    adapter=Adapter(
        transformer="Chroma", pipelines="Chroma in ComfyUI", plan=DOUBLE_AND_SINGLE, blocks=BLOCKS
    ),
)

RADIANCE = RecordedPlan(
    cls="chroma_radiance.model.ChromaRadiance",
    models="Chroma Radiance",
    arguments=("x", "timestep", "context", "guidance"),
    adapter=Adapter(
        transformer="ChromaRadiance",
        pipelines="Chroma Radiance in ComfyUI",
        # The decoder of pixels gets all tokens. Radiance takes no control, so what the plan says of it is not
        # used.
        plan=replace(
            DOUBLE_AND_SINGLE,
            outputs={"single_blocks.-1": Gather(dim=1, segment="image", after_replicated=True)},
        ),
        blocks=BLOCKS,
    ),
)
