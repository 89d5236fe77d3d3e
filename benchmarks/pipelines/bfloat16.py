"""A pipeline in bfloat16, whose random numbers are those of the same pipeline in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# Tiny pipelines that are not tried, and why.
NOT_IN_BFLOAT16 = {
    "lucy": "its VAE is given float32, by the unmodified pipeline too",
    "visual cloze": "is two pipelines, of which casting reaches one",
    **dict.fromkeys(
        (
            "qwen-image, editing",
            "qwen-image, editing, inpainting",
            "qwen-image, editing two images",
            "qwen-image, layers",
            "cosmos, video",
        ),
        "PyTorch has no avg_pool3d in bfloat16 on a CPU",
    ),
    **dict.fromkeys(
        (
            "kandinsky 5, one image",
            "kandinsky 5, one image, image",
            "kandinsky 5",
            "kandinsky 5, image",
            "z-image, image",
            "z-image, inpainting",
            "joyimage plus",
            "longcat-image, editing",
        ),
        "float32 meets bfloat16 in the unmodified pipeline, which raises on a CPU",
    ),
    **dict.fromkeys(
        ("stable audio", "stable audio 3", "stable audio 3, sound", "longcat-audio", "ace-step"),
        "its autoencoder's weight norm keeps tensors that cannot be copied, and copies are cast here",
    ),
}


def in_bfloat16(pipe: Any) -> Any:
    """``pipe`` with bfloat16 copies of its models: tiny pipelines share their encoders."""
    parts = {name: copy.deepcopy(part) for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    pipe.register_modules(**parts)
    return pipe.to(torch.bfloat16)


def cast(options: dict[str, Any]) -> dict[str, Any]:
    """What a call is given, float tensors in bfloat16."""
    return {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }


@contextmanager
def noise_of_float32() -> Iterator[None]:
    """``torch.randn`` draws in float32 and rounds: for the same seed it would draw other numbers in 16 bits."""
    randn = torch.randn

    def rounded(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        noise = randn(*size, dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **options)
        return noise if dtype is None else noise.to(dtype)

    with mock.patch.object(torch, "randn", rounded):
        yield
