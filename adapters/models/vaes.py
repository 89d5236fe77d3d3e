"""Autoencoders of diffusers whose image rows can be sharded, and those whose cannot.
Written for diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping

from para_core.adapters.row_adapter import VaeAdapter

_KL = ("tiled_encode", "_tiled_encode", "tiled_decode")
_CACHED_FRAMES = "a tile stores its last frames in its modules for the next call"
# Classes whose methods have the usual names; those without tiling; and those whose method is the public
# ``encode``.
_USUAL = (
    *(
        "AutoencoderDC",
        "AutoencoderKLCogVideoX",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanImageRefiner",
    ),
    *(
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLHunyuanVideo15",
        "AutoencoderKLLTX2Video",
        "AutoencoderKLLTXVideo",
    ),
    *("AutoencoderKLMochi", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan"),
)
_UNTILED = (
    "AutoencoderKLCosmos",
    "AutoencoderKLKVAEAudio",
    "AutoencoderKLKVAEVideo",
    "AutoencoderKLLTX2Audio",
)
_WITH_ENCODE = (
    "AutoencoderKLMiniMaxH3Audio",
    "AutoencoderKLTemporalDecoder",
    "Kandinsky6SRVAE",
    "LongCatAudioDiTVae",
)
_ADAPTERS = (
    *map(VaeAdapter, _USUAL),
    *[VaeAdapter(vae, tiled=()) for vae in _UNTILED],
    *[VaeAdapter(vae, encode="encode", decode="decode", tiled=()) for vae in _WITH_ENCODE],
    VaeAdapter("AutoencoderKL", tiled=_KL),
    VaeAdapter("AutoencoderKLAllegro", only_tiled=True),
    VaeAdapter("AutoencoderKLFlux2", tiled=_KL),
    VaeAdapter("AutoencoderKLKVAE", tiled=("_tiled_encode", "tiled_decode")),
    VaeAdapter("AutoencoderKLMagvit", why_not_tiles=_CACHED_FRAMES),
    # This class tiles by default. If the user turns tiling off, its decoder concatenates tokens of rows with
    # other tokens. Rows cannot be sharded then, so the call raises MixesRows.
    VaeAdapter("AutoencoderKLMiniMaxH3", tiled=("_encode_clip", "_decode_clip")),
    # A waveform [B, C, length] has no rows; its samples are sharded instead.
    VaeAdapter(
        "AutoencoderOobleck",
        tiled=("_tiled_encode", "_tiled_decode"),
        why_not_tiles="it reads each tile's length immediately",
    ),
    VaeAdapter(
        "AutoencoderTiny",
        encode="encode",
        decode="decode",
        tiled=("_tiled_encode", "_tiled_decode"),
        why_not_tiles="it blends each tile immediately",
    ),
    VaeAdapter("AutoencoderVidTok", why_not_tiles=_CACHED_FRAMES),
    VaeAdapter("Cosmos3AVAEAudioTokenizer", decode="decode", tiled=()),
    VaeAdapter(
        "LTX2VideoDiffusionDecoderModel",
        encode=None,
        decode="decode",
        tiled=("tiled_decode",),
        why_not_tiles="it draws the noise of each tile after that of the tile before",
        windows=True,
    ),
)
VAES: Mapping[str, VaeAdapter] = {adapter.vae: adapter for adapter in sorted(_ADAPTERS, key=lambda x: x.vae)}

# Other autoencoders of diffusers, each with the reason why its rows are not sharded.
REFUSED_VAES: Mapping[str, str] = {
    "AsymmetricAutoencoderKL": "its decoder also takes a mask and an image, whose rows would have to be sharded "
    "equally",
    "AutoencoderRAE": "its encoder and decoder are transformers of one small size, which concatenate a global token "
    "with those of rows",
    "AutoencoderSAME": "a transformer over a waveform, which doubles the number of tokens and folds them into chunks",
    "ConsistencyDecoderVAE": "it draws noise at every step of its own denoising loop",
    "MMAudioVAE": "it encodes a Fourier transform over all samples; its decoder makes a spectrogram of 8 s, which is "
    "small",
    "RFD4ProteinaAutoencoder": "it encodes proteins, which have no rows",
    "VQModel": "it looks up codes by the position of each pixel",
}
