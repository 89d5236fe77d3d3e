"""The autoencoders of diffusers with random weights, as small as they can be, and images of odd sizes for them."""

from __future__ import annotations

import warnings
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from para_core.adapters.vae.families import rows_per_latent
from zoo.tiny.base import small_config

# CogVideoX fails on tiles of one row, which are the last ones of make_tiled, on one device too. HunyuanImage's
# tiled_encode takes an image for a video, and fails on one device.
NO_TILES_ENCODED = ("CogVideoX", "HunyuanImage")
# diffusers' own tiling fails on one device. It pads one column by reflection (LTX2Video), or splits tiles by numbers of
# latents as if these were pixels (HunyuanImageRefiner).
NOT_TILED = ("LTX2Video", "HunyuanImageRefiner")
# These VAEs always decode by tiles.
BY_TILES = ("MiniMaxH3", "Allegro")
# These are small values of config fields, and a class takes those that it has.
_BY_VALUE = {
    1: "layers_per_block num_res_blocks enc_num_blocks num_dec_blocks num_enc_blocks num_layers token_drop",
    2: "attn_num_heads decoder_num_attention_heads decoder_num_layers enc_hop_length num_attention_heads "
    "temporal_compress_times",
    4: "latent_channels z_dim z_channels latent_dim norm_num_groups codebook_dim decoder_input_channels "
    "vocoder_input_dim",
    8: "attention_head_dim base_channels base_dim dec_dim decoder_channels downsampling_ratio enc_dim enc_latent_dim "
    "enc_n_fft encoder_dim encoder_hidden_size encoder_latent_dim",
}
SMALL = {name: value for value, names in _BY_VALUE.items() for name in names.split()}


def fill_randomly(module: nn.Module) -> nn.Module:
    """Set weights that are the same in every process and never zero. Return ``module`` in eval mode."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.1 * noise + ("weight" in name)
    return module.eval().requires_grad_(False)


class TinyVae:
    """An autoencoder class of diffusers with a small config, and the shapes of its inputs, which are higher than wide.

    Args:
        latents, pixels: Shapes of what is decoded and encoded.
        conditions, encoder_options: Further arguments of ``decode`` and of ``encode``.
        settings: Attributes that are set on the instance.
        tables, changes: Config fields other than those of :data:`SMALL` that the class takes; later ones win.
    """

    def __init__(
        self,
        cls: str,
        latents: tuple[int, ...],
        pixels: tuple[int, ...],
        *tables: dict[str, Any],
        conditions: dict[str, Any] | None = None,
        encoder_options: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.cls, self.latents, self.pixels = cls, latents, pixels
        self.conditions, self.encoder_options, self.settings = conditions or {}, encoder_options or {}, settings or {}
        self.options = small_config(cls, SMALL)
        for table in (*tables, changes):
            self.options |= table

    def make(self, **changes: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Oobleck's weight_norm warns.
            vae: Any = getattr(diffusers, self.cls)(**self.options | changes)
        for name, value in self.settings.items():
            setattr(vae, name, value)
        return fill_randomly(vae)

    def make_tiled(self) -> nn.Module:
        """Build the VAE with tiles of 4 × 4 latents at a stride of 3, small enough for the images here."""
        vae: Any = self.make()
        vae.use_tiling = True
        ratio = rows_per_latent(vae)
        sizes = {"tile_sample_min_size": 4 * ratio, "tile_latent_min_size": 4}
        sizes |= _square("tile_sample_min", 4 * ratio) | _square("tile_latent_min", 4)
        sizes |= _square("tile_sample_stride", 3 * ratio) | _square("tile_sample_min_overlap", ratio)
        for attribute, size in sizes.items():
            if hasattr(vae, attribute):
                setattr(vae, attribute, size)
        return vae

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        out = vae.decode(latents, **self.conditions)
        return out if isinstance(out, Tensor) else out.sample

    def encode(self, vae: Any, pixels: Tensor) -> Tensor:
        out = vae.encode(pixels, **self.encoder_options)
        for name in ("latents", "latent"):
            if name in out:
                return out[name]
        latents = out.latent_dist
        return latents.parameters if hasattr(latents, "parameters") else torch.cat([latents.mean, latents.logs])


def random_image(shape: tuple[int, ...], *, wide: bool = False, seed: int = 1) -> Tensor:
    """Return noise of ``shape``, with its last two sizes swapped if ``wide``."""
    if wide:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _square(name: str, size: int) -> dict[str, int]:
    return {f"{name}_height": size, f"{name}_width": size}


def _both(**fields: Any) -> dict[str, Any]:
    """Return each field for the encoder and for the decoder."""
    return {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in fields.items()}


_KL: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
}
_WAN: dict[str, Any] = {"dim_mult": [1, 2, 2, 2], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_WAN22 = {**_WAN, "decoder_base_dim": 8, "in_channels": 12, "out_channels": 12, "patch_size": 2}
_LTX: dict[str, Any] = {"latent_channels": 8, "layers_per_block": (1,) * 5, "spatial_compression_ratio": 32}
_LTX2: dict[str, Any] = {
    **_LTX,
    "block_out_channels": (8, 16, 32, 32),
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1,) * 4,
}
_HUNYUAN = {"block_out_channels": (8, 8, 16, 16)}
_HUNYUAN15 = {"block_out_channels": (8, 16, 16, 16, 16)}
_TINY = {**_both(block_out_channels=(8,) * 3), "num_encoder_blocks": (1,) * 3, "num_decoder_blocks": (1,) * 3}
_DC = {
    **_both(block_types=("ResBlock", "EfficientViTBlock"), block_out_channels=(8, 16)),
    **_both(layers_per_block=(1, 1), qkv_multiscales=((), (5,))),
    "latent_channels": 8,
    "upsample_block_type": "interpolate",
}
_UNIT_NORMAL = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_MOCHI = {**_both(block_out_channels=(32,) * 4), "layers_per_block": (1,) * 5, **_UNIT_NORMAL}
_QWEN21 = {**_WAN, "dim_mult": [1, 2, 2, 2, 2], "decoder_base_dim": 8}
_LTX1 = {**_LTX, **_HUNYUAN, "decoder_block_out_channels": (8, 8, 16, 16), "decoder_layers_per_block": (1,) * 5}
_DOWN = {
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "spatio_temporal_scaling": (True,) * 4,
}
_UP = {"decoder_spatio_temporal_scaling": (True,) * 3, "upsample_residual": (True,) * 3, "upsample_factor": (2,) * 3}
_LTX095 = {**_LTX2, **_DOWN, **_UP, "decoder_inject_noise": (False,) * 4, "timestep_conditioning": True}
_COSMOS = dict.fromkeys(("encoder_block_out_channels", "decode_block_out_channels"), (8, 16, 16, 16))
_TEMPORAL = {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 32)}
_HUNYUAN_IMAGE = {"in_channels": 3, "out_channels": 3, "latent_channels": 8, "block_out_channels": (32, 64)}
_HUNYUAN_IMAGE |= {"spatial_compression_ratio": 2, "sample_size": 32}
_LONGCAT = {"channels": 8, "c_mults": [1, 2], "strides": [2, 4]}
_KANDINSKY = {**_both(block_out_channels=(8, 16, 32)), "temporal_compression_ratio": 2}
_COSMOS_SOUND = {"dec_c_mults": (1, 2), "dec_strides": (4, 3), "enc_c_mults": (1, 2), "enc_strides": (2, 3)}
_RATES = {"encoder_rates": [2, 3], "latent_dim": 16, "decoder_dim": 16, "decoder_rates": [3, 2]}
_FACTORS = {"spatial_downsample_factors": (2, 2, 1), "temporal_downsample_factors": (1, 2, 1), "clip_length": 5}
_H3_STATISTICS = {"latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
_H3 = {**_FACTORS, **_H3_STATISTICS, "block_out_channels": (8, 16, 16), "decoder_attention_head_dim": 16}
_KERNELS = {
    "decoder_kernel_sizes": (9, 4),
    "resblock_kernel_sizes": (3, 7),
    "resblock_dilation_sizes": ((1, 3), (1, 5)),
}
_H3_SOUND = {**_RATES, "encoder_rates": (2, 5), "decoder_rates": (5, 2), **_KERNELS}
# These attributes give tiles of time, of space, and of both.
_TIME_TILES = {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4}
_H3_TILES = _square("tile_sample_min", 64) | _square("tile_sample_min_overlap", 16)
_ALLEGRO_TILES = {"use_tiling": True, "kernel": (8, 32, 32), "stride": (4, 24, 24)}
_TIME, _NO_SAMPLE = {"temb": torch.tensor([0.05])}, {"sample_posterior": False}
# These are shapes of latents, and of their pixels with 8 × 8 pixels per latent.
_IMAGE, _VIDEO, _SOUND = (1, 4, 7, 5), (1, 4, 2, 7, 4), (1, 4, 15)
_FRAMES = (1, 3, 5, 56, 32)

TINY_VAES: dict[str, TinyVae] = {
    "KL": TinyVae("AutoencoderKL", _IMAGE, (2, 3, 15, 10), _KL),
    "Flux2": TinyVae("AutoencoderKLFlux2", (2, 4, 7, 5), (1, 3, 14, 10), _KL, layers_per_block=2),
    "Tiny": TinyVae("AutoencoderTiny", _IMAGE, (1, 3, 28, 20), _TINY),
    "DC": TinyVae("AutoencoderDC", (1, 8, 7, 5), (1, 3, 14, 10), _DC),
    "HunyuanVideo": TinyVae("AutoencoderKLHunyuanVideo", _VIDEO, _FRAMES, _HUNYUAN),
    # There are more frames than in a tile of time. By default the VAE decodes such tiles one after the other.
    "HunyuanVideo, long": TinyVae(
        "AutoencoderKLHunyuanVideo", (1, 4, 4, 7, 4), (1, 3, 13, 56, 32), _HUNYUAN, settings=_TIME_TILES
    ),
    "HunyuanVideo15": TinyVae("AutoencoderKLHunyuanVideo15", _VIDEO, (1, 3, 5, 112, 64), _HUNYUAN15),
    "Mochi": TinyVae("AutoencoderKLMochi", _VIDEO, (1, 3, 7, 56, 32), _MOCHI),
    "CogVideoX": TinyVae("AutoencoderKLCogVideoX", (1, 4, 3, 7, 4), _FRAMES, _HUNYUAN),
    "Wan 2.1": TinyVae("AutoencoderKLWan", _VIDEO, _FRAMES, _WAN),
    "Wan 2.2": TinyVae(
        "AutoencoderKLWan", _VIDEO, (1, 3, 5, 112, 64), _WAN22, is_residual=True, scale_factor_spatial=16
    ),
    "QwenImage": TinyVae("AutoencoderKLQwenImage", (1, 4, 1, 7, 4), (1, 3, 1, 56, 32), _WAN),
    "QwenImage21": TinyVae("AutoencoderKLQwenImage21", (1, 4, 1, 7, 4), (1, 4, 1, 112, 64), _QWEN21),
    "LTXVideo": TinyVae("AutoencoderKLLTXVideo", (1, 8, 2, 7, 4), (1, 3, 9, 224, 128), _LTX1),
    "LTXVideo 0.9.5": TinyVae(
        "AutoencoderKLLTXVideo", (1, 8, 2, 7, 4), (1, 3, 17, 224, 128), _LTX095, conditions=_TIME
    ),
    "LTX2Video": TinyVae("AutoencoderKLLTX2Video", (1, 8, 2, 7, 4), (1, 3, 17, 224, 128), _LTX2),
    "Cosmos": TinyVae(
        "AutoencoderKLCosmos", _VIDEO, (1, 3, 9, 56, 32), _COSMOS, attention_resolutions=(8,), resolution=64
    ),
    "Magvit": TinyVae("AutoencoderKLMagvit", _VIDEO, _FRAMES, _HUNYUAN),
    "TemporalDecoder": TinyVae(
        "AutoencoderKLTemporalDecoder", (2, 4, 7, 5), (2, 3, 14, 10), _TEMPORAL, conditions={"num_frames": 2}
    ),
    "HunyuanImage": TinyVae("AutoencoderKLHunyuanImage", (1, 8, 7, 5), (1, 3, 14, 10), _HUNYUAN_IMAGE),
    "HunyuanImageRefiner": TinyVae("AutoencoderKLHunyuanImageRefiner", _VIDEO, (1, 3, 5, 112, 64), _HUNYUAN15),
    "Oobleck": TinyVae("AutoencoderOobleck", _SOUND, (1, 2, 120), downsampling_ratios=[2, 4], channel_multiples=[1, 2]),
    "LTX2, sound": TinyVae("AutoencoderKLLTX2Audio", (1, 4, 7, 4), (1, 2, 28, 16), ch_mult=(1, 2, 2), mel_bins=28),
    "LongCatAudioDiT": TinyVae("LongCatAudioDiTVae", _SOUND, (1, 1, 120), _LONGCAT, encoder_options=_NO_SAMPLE),
    "Cosmos3, sound": TinyVae("Cosmos3AVAEAudioTokenizer", _SOUND, (1, 2, 180), _COSMOS_SOUND),
    "Kandinsky6SR": TinyVae("Kandinsky6SRVAE", (1, 4, 3, 7, 4), (1, 3, 5, 28, 16), _KANDINSKY),
    "MiniMaxH3": TinyVae("AutoencoderKLMiniMaxH3", (1, 4, 5, 7, 4), (1, 3, 10, 28, 16), _H3, settings=_H3_TILES),
    "MiniMaxH3, sound": TinyVae("AutoencoderKLMiniMaxH3Audio", (2, 4, 15), (2, 1, 150), _H3_SOUND),
    "KVAE": TinyVae("AutoencoderKLKVAE", _IMAGE, (1, 3, 14, 10), channels=32, ch_mult=(1, 2)),
    "KVAE, video": TinyVae("AutoencoderKLKVAEVideo", (1, 4, 3, 7, 4), (1, 3, 5, 28, 16), ch=32, ch_mult=(1, 1, 2)),
    "KVAE, sound": TinyVae("AutoencoderKLKVAEAudio", _SOUND, (1, 1, 90), _RATES),
    "VidTok": TinyVae("AutoencoderVidTok", _VIDEO, (1, 3, 8, 56, 32), ch=8, ch_mult=[1, 2, 2, 2]),
    "Allegro": TinyVae("AutoencoderKLAllegro", _VIDEO, (1, 3, 8, 56, 32), _HUNYUAN, settings=_ALLEGRO_TILES),
}
