"""UNets of diffusers of which rows are sharded over ranks, and what runs beside them. Read against diffusers 0.42."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.instance_patching import original_class


@dataclass(frozen=True)
class UnetAdapter:
    """What is to be known of one UNet.

    Args:
        unet: name of the class.
        pipelines: what a user calls the pipelines that it serves, for messages; empty for what runs beside a UNet.
        images: arguments ``[..., H, W]`` of which rows are sharded: the first says how, others have a multiple of its rows.
    """

    unet: str
    pipelines: str = ""
    images: tuple[str, ...] = ("sample",)


UNETS: Mapping[str, UnetAdapter] = {
    adapter.unet: adapter
    for adapter in (
        UnetAdapter("UNet2DConditionModel", "Stable Diffusion 1, 2 and Stable Diffusion XL"),
        UnetAdapter("UNetSpatioTemporalConditionModel", "Stable Video Diffusion"),
        # What it returns is gathered, for a pipeline may add up what several of them return.
        UnetAdapter("ControlNetModel", images=("sample", "controlnet_cond")),
    )
}

_UNTRIED = "nobody tried yet"

REFUSED_UNETS: Mapping[str, str] = {
    "AudioLDM2UNet2DConditionModel": _UNTRIED,
    "DreamLiteUNetModel": _UNTRIED,
    "I2VGenXLUNet": _UNTRIED,
    "Kandinsky3UNet": _UNTRIED,
    "StableCascadeUNet": _UNTRIED,
    "UNet1DModel": _UNTRIED,
    "UNet2DModel": _UNTRIED,
    "UNet3DConditionModel": _UNTRIED,
    "UNetControlNetXSModel": _UNTRIED,
    "UNetMotionModel": _UNTRIED,
}


def unet_adapter(unet: Any) -> UnetAdapter | None:
    """What is known of ``unet``; None for an unknown class."""
    names = [cls.__name__ for cls in original_class(unet).__mro__]
    return next((UNETS[name] for name in names if name in UNETS), None)


def why_refused_unet(unet: Any) -> str:
    return REFUSED_UNETS.get(original_class(unet).__name__, "nothing is known of it")
