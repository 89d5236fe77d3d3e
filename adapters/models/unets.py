"""UNets and ControlNets of diffusers whose image rows can be sharded over ranks. Written for diffusers 0.42."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnetAdapter:
    """Description of one UNet or ControlNet class, ``unet``. ``pipelines`` are for messages.

    ``images`` are the arguments ``[..., H, W]`` whose rows are sharded: the rows of the first are split over the ranks.
    Others have a multiple of its number of rows, and are split in the same proportion.
    """

    unet: str
    pipelines: str = ""
    images: tuple[str, ...] = ("sample",)


UNETS: Mapping[str, UnetAdapter] = {
    adapter.unet: adapter
    for adapter in (
        UnetAdapter("UNet2DConditionModel", "Stable Diffusion 1, 2 and Stable Diffusion XL"),
        UnetAdapter("UNetSpatioTemporalConditionModel", "Stable Video Diffusion"),
        # The output of a ControlNet is gathered on every rank, because a pipeline may add the outputs of several
        # ControlNets.
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
