"""The types ``VaeAdapter`` and ``UnetAdapter``: models of diffusers whose image rows can be sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VaeAdapter:
    """Description of one autoencoder class, ``vae``.

    Args:
        encode, decode: Names of the methods to parallelize, which take and return images ``[..., H, W]``.
            Each is the innermost method inside which all decisions by the image's size are made, such as
            whether to tile. Methods around it may only split the batch (slicing). ``encode`` is None for a
            class that only decodes.
        tiled: Names of the methods that split an image into tiles, run the encoder or decoder on each tile,
            and blend the results; empty without tiling.
        only_tiled: Whether the class always tiles.
        why_not_tiles: Why the tiles cannot be distributed over ranks; empty if they can.
        windows: Whether it is a diffusion decoder whose attention is limited to a window around each pixel.
    """

    vae: str
    encode: str | None = "_encode"
    decode: str = "_decode"
    tiled: tuple[str, ...] = ("tiled_encode", "tiled_decode")
    only_tiled: bool = False
    why_not_tiles: str = ""
    windows: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods to parallelize: ``encode``, if there is one, and ``decode``."""
        if self.encode is None:
            return (self.decode,)
        return (self.encode, self.decode)

    @property
    def distributes_tiles(self) -> bool:
        return not self.why_not_tiles


@dataclass(frozen=True)
class UnetAdapter:
    """Description of a UNet or ControlNet class of diffusers whose image rows can be sharded.

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
