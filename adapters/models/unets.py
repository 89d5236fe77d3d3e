"""UNets and ControlNets of diffusers whose image rows can be sharded over ranks. Written for diffusers 0.42.

``adapters/vae/unet_checks.py`` looks them up. Tests: tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnetAdapter:
    """Description of a UNet or ControlNet class of diffusers whose image rows can be sharded.

    All tensors among the arguments of such a class, also those in lists and dicts, must have one entry for
    each sample along dim 0, or a number of entries there that never equals a number of samples above 1. Over
    ranks that share samples, a tensor is split if dim 0 has their number, and passed whole otherwise. All
    tensors of the output must have one entry for each sample along dim 0.

    Each entry of ``down_blocks`` with a ``downsamplers`` halves the rows once (a convolution with stride 2), and
    nothing else does.

    Args:
        unet (`str`): Name of the class.
        pipelines (`str`, *optional*): Names of the pipelines that use it, for error messages.
        images (`tuple[str, ...]`): Arguments ``[..., H, W]`` that are sharded along H, or along W if W is
            larger. The rows of the first are split over the ranks. Another argument is split in the same
            proportion if its number of rows is a multiple of the first's, and is passed whole otherwise.
    """

    unet: str
    pipelines: str = ""
    images: tuple[str, ...] = ("sample",)


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
