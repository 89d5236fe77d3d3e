"""UNets and ControlNets of diffusers whose image rows can be sharded over ranks.
Written for diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping

from para_core.adapters.row_adapter import UnetAdapter

UNETS: Mapping[str, UnetAdapter] = {
    adapter.unet: adapter
    for adapter in (
        UnetAdapter("UNet2DConditionModel", "Stable Diffusion 1, 2 and Stable Diffusion XL"),
        UnetAdapter("UNetSpatioTemporalConditionModel", "Stable Video Diffusion"),
        # Every rank gets the output of a ControlNet, because a pipeline may add the outputs of several.
        UnetAdapter("ControlNetModel", images=("sample", "controlnet_cond")),
    )
}

REFUSED_UNETS: Mapping[str, str] = dict.fromkeys(
    (
        *(
            "AudioLDM2UNet2DConditionModel",
            "DreamLiteUNetModel",
            "I2VGenXLUNet",
            "Kandinsky3UNet",
            "StableCascadeUNet",
        ),
        *("UNet1DModel", "UNet2DModel", "UNet3DConditionModel", "UNetControlNetXSModel", "UNetMotionModel"),
    ),
    "it was not tried yet",
)
