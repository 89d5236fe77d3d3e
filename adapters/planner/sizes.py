"""The sizes of one generation. Imports no torch, so that the planner starts at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes of one generation: pixels, frames (1 for an image) and text tokens; and the dtype of its inputs.

    A latent pixel has ``spatial`` pixels along each side, and a latent frame after the first has ``temporal`` frames.
    A dtype of None stands for torch's default.
    """

    height: int
    width: int
    frames: int
    text: int
    spatial: int = 8
    temporal: int = 4
    dtype: torch.dtype | None = None

    @property
    def latents(self) -> tuple[int, int, int]:
        """Number of frames, height and width of the latents. Both are even: pixels that are left over are cut."""
        height, width = (2 * (side // (2 * self.spatial)) for side in (self.height, self.width))
        return (self.frames - 1) // self.temporal + 1, height, width

    @property
    def tokens(self) -> int:
        """Number of tokens of an image or of a latent frame, each of 2 × 2 latent pixels."""
        _, height, width = self.latents
        return (height // 2) * (width // 2)

    def __str__(self) -> str:
        pixels = f"{self.width} × {self.height}"
        return pixels if self.frames == 1 else f"{pixels} × {self.frames}"

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # Imported here, because the sizes of a published model need no torch.
        import torch

        return torch.empty(shape, dtype=dtype or self.dtype)


# Side of the small latents that are decoded to count operations.
DECODED_SIDE = 8


@dataclass(frozen=True)
class DecoderCounts:
    """The floating-point operations of decoding small latents with 1, 2 and 3 frames; of an image VAE with 1 frame.

    Args:
        by_frames (`tuple[tuple[float, float], ...]`): Operations of convolutions and of attention, for each number of
            frames.
    """

    by_frames: tuple[tuple[float, float], ...] = ((0.0, 0.0),)

    def operations(self, sizes: GenerationSizes, tiled: float = 0.0) -> float:
        """Return the operations of decoding latents of ``sizes``.

        Convolutions grow with the number of pixels, attention with its square. ``tiled`` is the fraction of a tile that
        overlaps with the next one.
        """
        frames, height, width = sizes.latents
        counted = min(frames, 2, len(self.by_frames))
        convolutions, attention = self.by_frames[counted - 1]
        if frames > 2 and len(self.by_frames) > 2:
            # The first latent frame decodes to fewer frames than later ones, so the third tells what one more takes.
            longer = self.by_frames[2]
            convolutions += (frames - 2) * (longer[0] - convolutions)
            attention += (frames - 2) * (longer[1] - attention)
        scale = height * width / DECODED_SIDE**2
        return (convolutions * scale + attention * scale**2) / (1.0 - tiled) ** 2


def require_size(name: str, sizes: GenerationSizes, *, is_video: bool) -> None:
    """Raise ValueError if model ``name`` cannot generate ``sizes``: frames of an image, or less than one token."""
    if not is_video and sizes.frames > 1:
        raise ValueError(f"frames is {sizes.frames}, but {name} generates images: omit frames.")
    least = 2 * sizes.spatial  # For most models a token is 2 × 2 latent pixels.
    if min(sizes.height, sizes.width) < least:
        raise ValueError(
            f"{sizes.width} × {sizes.height} pixels are less than one token of {name}; expected at least {least} × "
            f"{least}."
        )
