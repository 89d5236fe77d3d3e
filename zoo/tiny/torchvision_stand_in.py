"""The few functions of torchvision that diffusers' OmniGen and Cosmos 2.5 call, for machines without it.

torchvision is built for one version of torch, so tests do not require it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate


def _to_tensor(image: Image.Image) -> Tensor:
    """Return ``[C, H, W]``, from 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def _compose(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda x: reduce(lambda value, step: step(value), steps, x)


def _normalize(mean: Sequence[float], std: Sequence[float], inplace: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


_TRANSFORMS = SimpleNamespace(
    Compose=_compose,
    Lambda=lambda function: function,
    ToTensor=lambda: _to_tensor,
    Normalize=_normalize,
    InterpolationMode=SimpleNamespace(NEAREST="nearest"),
    functional=SimpleNamespace(
        to_tensor=_to_tensor, resize=lambda x, size, interpolation: interpolate(x, tuple(size), mode=interpolation)
    ),
)


def stand_in_for_torchvision() -> None:
    """Give diffusers' modules that could not import torchvision the functions that they use."""
    if find_spec("torchvision") is not None:
        return
    from diffusers.models.controlnets import controlnet_cosmos
    from diffusers.models.transformers import transformer_cosmos
    from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    for module in (controlnet_cosmos, transformer_cosmos, processor_omnigen):
        module.transforms = _TRANSFORMS
    pipeline_cosmos2_5_predict.torchvision = SimpleNamespace(transforms=_TRANSFORMS)
    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
