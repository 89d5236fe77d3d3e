"""Arguments of short calls of tiny pipelines: sizes, images, embeddings of text, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from zoo.tiny.base import IMAGE_WIDTH, TEXT_WIDTH

IMAGE_TOKENS = 5  # The tokens have 8 × 8 pixels each, and one token represents the whole image.
PROMPT = "a large red circle at the top left, on white"


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def random_mask(height: int, width: int) -> Image.Image:
    return random_image(height, width, seed=1).convert("L")


def random_video(frames: int, height: int, width: int) -> list[Image.Image]:
    return [random_image(height, width, seed) for seed in range(frames)]


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_both(**values: Callable[[int], Any]) -> dict[str, Any]:
    """Return each value for the prompt and, as ``negative_…``, for the negative prompt, computed from 0 and 1."""
    kinds = enumerate(("", "negative_"))
    return {f"{kind}{name}": make(index) for index, kind in kinds for name, make in values.items()}


def embeddings(tokens: int, width: int, name: str = "embeds") -> dict[str, Tensor]:
    """Return ``prompt_<name>`` and ``negative_prompt_<name>``."""
    generator = torch.Generator().manual_seed(tokens)
    return of_both(**{f"prompt_{name}": lambda _: torch.randn(1, tokens, width, generator=generator)})


def instead_of_text(tokens: int, width: int) -> dict[str, Any]:
    """Return embeddings of a prompt and a negative prompt, and None as prompt.

    Some pipelines clean a prompt with ftfy and fail without it (Wan's from images and videos, ChronoEdit, Helios).
    """
    return {"prompt": None, **embeddings(tokens, width)}


def listed(both: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return embeddings as lists of samples. The negative one has five tokens."""
    lengths = {"prompt_embeds": 9, "negative_prompt_embeds": 5}
    return {name: [both[name][0, :length]] for name, length in lengths.items()}


def pooled(name: str = "pooled_prompt_embeds") -> dict[str, Tensor]:
    """Return pooled embeddings of a prompt and of a negative one."""
    both = embeddings(1, IMAGE_WIDTH).values()
    return {f"{kind}{name}": value[:, 0] for kind, value in zip(("", "negative_"), both, strict=True)}


def first(length: int, total: int = 9) -> Tensor:
    """Return a mask ``[1, total]`` of a text of ``length`` tokens."""
    return (torch.arange(total) < length)[None]


def masks(
    name: str, dtype: torch.dtype = torch.bool, lengths: tuple[int, int] = (9, 5), total: int = 9
) -> dict[str, Tensor]:
    """Return masks of the prompt, in which by default all tokens are valid, and of the negative prompt."""
    return of_both(**{f"prompt_{name}": lambda i: first(lengths[i], total).to(dtype)})


# There are 3 × 5 image tokens of 16 × 16 or of 8 × 8 pixels.
SIZE = {"height": 48, "width": 80}
SMALL = {"height": 24, "width": 40}
# There are 4 × 6 image tokens of 16 × 16 pixels.
MEDIUM = {"height": 64, "width": 96}
VIDEO = {**SIZE, "num_frames": 9}
IMAGE, SMALL_IMAGE = random_image(48, 80), random_image(24, 40)
MASK, SMALL_MASK = random_mask(48, 80), random_mask(24, 40)
FRAMES = random_video(9, 48, 80)
TEXT = instead_of_text(9, TEXT_WIDTH)
