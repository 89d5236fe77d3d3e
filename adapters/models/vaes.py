"""Autoencoders of diffusers of which rows are shared out over ranks. Read against diffusers 0.42."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.instance import original_class


@dataclass(frozen=True)
class VaeAdapter:
    """What is to be known of one autoencoder: the methods that take and give pictures ``[..., H, W]``, and how it tiles.

    ``encode`` and ``decode`` name the innermost method around which nothing depends on the size of a picture: slices over the batch
    are taken outside of it. ``tiled`` names those that tile and blend, which are given, and give, all rows.
    """

    vae: str
    encode: str = "_encode"
    decode: str = "_decode"
    tiled: tuple[str, ...] = ("tiled_encode", "tiled_decode")
    # Without tiling it does nothing at all.
    only_tiled: bool = False


_KL = ("tiled_encode", "_tiled_encode", "tiled_decode")
_PLAIN: tuple[str, ...] = ()

VAES: Mapping[str, VaeAdapter] = {
    adapter.vae: adapter
    for adapter in (
        VaeAdapter("AutoencoderDC"),
        VaeAdapter("AutoencoderKL", tiled=_KL),
        VaeAdapter("AutoencoderKLAllegro", only_tiled=True),
        VaeAdapter("AutoencoderKLCogVideoX"),
        VaeAdapter("AutoencoderKLCosmos", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLFlux2", tiled=_KL),
        VaeAdapter("AutoencoderKLHunyuanImage"),
        VaeAdapter("AutoencoderKLHunyuanImageRefiner"),
        VaeAdapter("AutoencoderKLHunyuanVideo"),
        VaeAdapter("AutoencoderKLHunyuanVideo15"),
        VaeAdapter("AutoencoderKLLTX2Video"),
        VaeAdapter("AutoencoderKLLTXVideo"),
        VaeAdapter("AutoencoderKLMagvit"),
        VaeAdapter("AutoencoderKLMochi"),
        VaeAdapter("AutoencoderKLQwenImage"),
        VaeAdapter("AutoencoderKLTemporalDecoder", encode="encode", decode="decode", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLWan"),
        VaeAdapter("AutoencoderTiny", encode="encode", decode="decode", tiled=("_tiled_encode", "_tiled_decode")),
    )
}


def rows_per_latent(vae: Any) -> int:
    """How many rows of pixels become one row of latents."""
    config = vae.config
    for found in (getattr(vae, "spatial_compression_ratio", None), getattr(config, "spatial_compression_ratio", None)):
        if found is not None:
            return int(found)
    channels = getattr(config, "block_out_channels", None) or config.encoder_block_out_channels
    return int(2 ** (len(channels) - 1))


def vae_adapter(vae: Any) -> VaeAdapter | None:
    """What is known of ``vae``; None for an unknown class."""
    return VAES.get(original_class(vae).__name__)
