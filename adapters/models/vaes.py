"""Autoencoders of diffusers of which rows are sharded over ranks. Read against diffusers 0.42."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.instance_patching import original_class


@dataclass(frozen=True)
class VaeAdapter:
    """What is to be known of one autoencoder: the methods that take and give images ``[..., H, W]``, and how it tiles.

    ``encode`` and ``decode`` name the innermost method around which nothing depends on the size of an image: slices over the batch
    are taken outside of it. ``tiled`` names those that tile and blend, which are given, and give, all rows.
    """

    vae: str
    encode: str = "_encode"
    decode: str = "_decode"
    tiled: tuple[str, ...] = ("tiled_encode", "tiled_decode")
    # Without tiling it does nothing at all.
    only_tiled: bool = False
    why_not_tiles: str = ""  # why its tiles are not distributed, though it has a tiling

    @property
    def shares_tiles(self) -> bool:
        return not self.why_not_tiles


_KL = ("tiled_encode", "_tiled_encode", "tiled_decode")
_PLAIN: tuple[str, ...] = ()
_FRAMES_LEFT = "a tile leaves its last frames in its modules for the next call"

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
        VaeAdapter("AutoencoderKLKVAE", tiled=("_tiled_encode", "tiled_decode")),
        VaeAdapter("AutoencoderKLKVAEAudio", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLKVAEVideo", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLLTX2Audio", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLLTX2Video"),
        VaeAdapter("AutoencoderKLLTXVideo"),
        VaeAdapter("AutoencoderKLMagvit", why_not_tiles=_FRAMES_LEFT),
        # It tiles by default; without tiles its decoder joins tokens of all rows with others, which is refused by name.
        VaeAdapter("AutoencoderKLMiniMaxH3", tiled=("_encode_clip", "_decode_clip")),
        VaeAdapter("AutoencoderKLMiniMaxH3Audio", encode="encode", decode="decode", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLMochi"),
        VaeAdapter("AutoencoderKLQwenImage"),
        VaeAdapter("AutoencoderKLQwenImage21"),
        VaeAdapter("AutoencoderKLTemporalDecoder", encode="encode", decode="decode", tiled=_PLAIN),
        VaeAdapter("AutoencoderKLWan"),
        # [B, C, length]: what is said of rows is said of samples of a waveform.
        VaeAdapter(
            "AutoencoderOobleck",
            tiled=("_tiled_encode", "_tiled_decode"),
            why_not_tiles="it asks for each tile's length as soon as it has it",
        ),
        VaeAdapter(
            "AutoencoderTiny",
            encode="encode",
            decode="decode",
            tiled=("_tiled_encode", "_tiled_decode"),
            why_not_tiles="it blends each tile as soon as it has it",
        ),
        VaeAdapter("AutoencoderVidTok", why_not_tiles=_FRAMES_LEFT),
        VaeAdapter("Cosmos3AVAEAudioTokenizer", decode="decode", tiled=_PLAIN),
        VaeAdapter("Kandinsky6SRVAE", encode="encode", decode="decode", tiled=_PLAIN),
        VaeAdapter("LongCatAudioDiTVae", encode="encode", decode="decode", tiled=_PLAIN),
    )
}


# The others of diffusers, and why their rows are not distributed.
REFUSED_VAES: Mapping[str, str] = {
    "AsymmetricAutoencoderKL": "its decoder takes a mask and an image, of which rows would have to be distributed alike",
    "AutoencoderRAE": "its encoder and its decoder are transformers of one small size, which join a token of all with those of rows",
    "AutoencoderSAME": "a transformer over a waveform, which joins its tokens with as many new ones and folds them to chunks",
    "ConsistencyDecoderVAE": "it draws noise at every step of its own denoising loop",
    "MMAudioVAE": "it encodes a Fourier transform over all samples; its decoder makes a spectrogram of 8 s, which is small",
    "RFD4ProteinaAutoencoder": "it encodes proteins, which have no rows",
    "VQModel": "it looks up codes by the place of each pixel",
}


def rows_per_latent(vae: Any) -> int:
    """How many rows of pixels become one row of latents."""
    config = vae.config
    # Asked of the instance, diffusers looks in the config, too, and warns.
    own = [vars(vae).get(name) for name in ("spatial_compression_ratio", "hop_length", "_hop_size")]
    for found in (config.get("spatial_compression_ratio"), config.get("downsampling_ratio"), *own):
        if found is not None:
            return int(found)
    levels = next(
        config[name] for name in ("block_out_channels", "encoder_block_out_channels", "ch_mult") if name in config
    )
    return int(2 ** (len(levels) - 1))


def vae_adapter(vae: Any) -> VaeAdapter | None:
    """What is known of ``vae``; None for an unknown class."""
    return VAES.get(original_class(vae).__name__)
