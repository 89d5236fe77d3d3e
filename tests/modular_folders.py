"""Folders of tiny modular pipelines, as ``ModularPipeline.save_pretrained`` writes them."""

from typing import Any

import torch
from diffusers import FluxPipeline, ModularPipeline
from diffusers.modular_pipelines import FluxAutoBlocks, LTXAutoBlocks, QwenImageAutoBlocks

from para_core.fleet.pipeline_info import find_tiny_flux
from zoo.tiny.pipelines import PIPELINES

MODULAR = {
    "flux": (FluxAutoBlocks, lambda: FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)),
    "qwen-image": (QwenImageAutoBlocks, PIPELINES["qwen-image"].build),
    "ltx": (LTXAutoBlocks, PIPELINES["ltx"].build),
}


def save_modular(name: str, folder: str) -> str:
    """Save the modular pipeline ``name`` into ``folder``, and return the folder."""
    blocks, build = MODULAR[name]
    expected, parts = [component.name for component in blocks().expected_components], build().components
    pipe = blocks().init_pipeline()
    pipe.update_components(**{part: parts[part] for part in expected if parts.get(part) is not None})
    pipe.save_pretrained(folder, overwrite_modular_index=True)
    return folder


def plain_modular(folder: str, output: str, *, seed: int, guidance: float | None = None, **call: Any) -> Any:
    """Return the output of diffusers alone with the pipeline in ``folder``."""
    pipe = ModularPipeline.from_pretrained(folder)
    pipe.load_components(dtype=torch.float32)
    if guidance is not None:
        pipe.update_components(guider=pipe.guider.new(guidance_scale=guidance))
    return pipe(output=output, output_type="pil", generator=torch.Generator().manual_seed(seed), **call)
