"""UNets and ControlNets of diffusers whose rows are sharded over ranks. Read against diffusers 0.42."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.instance_patching import original_class


@dataclass(frozen=True)
class UnetAdapter:
    """Facts about one UNet or ControlNet.

    Args:
        unet: Name of the class.
        pipelines: Names of its pipelines as users know them, for messages; empty for a ControlNet.
        images: Arguments ``[..., H, W]`` whose rows are sharded. The first decides the layout; others have a multiple
            of its rows.
    """

    unet: str
    pipelines: str = ""
    images: tuple[str, ...] = ("sample",)


UNETS: Mapping[str, UnetAdapter] = {
    adapter.unet: adapter
    for adapter in (
        UnetAdapter("UNet2DConditionModel", "Stable Diffusion 1, 2 and Stable Diffusion XL"),
        UnetAdapter("UNetSpatioTemporalConditionModel", "Stable Video Diffusion"),
        # Its output is gathered, because a pipeline may add the outputs of several ControlNets.
        UnetAdapter("ControlNetModel", images=("sample", "controlnet_cond")),
    )
}

_UNTRIED = "it was not tried yet"

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
    """Return the adapter for the class of ``unet``, or for the nearest of its base classes; None if there is none."""
    names = [cls.__name__ for cls in original_class(unet).__mro__]
    return next((UNETS[name] for name in names if name in UNETS), None)


def why_refused_unet(unet: Any) -> str:
    """Return the reason why a UNet without an adapter cannot run on several ranks."""
    return REFUSED_UNETS.get(original_class(unet).__name__, "para_core has no adapter for it")
