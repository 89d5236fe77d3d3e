"""The autoencoders of diffusers with random weights, as small as they can be, and images of odd sizes for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from para_core.adapters.models.vaes import rows_per_latent

# A tile of one row, as the last ones of make_tiled are, is too small for what this one encodes with, on one device,
# too. HunyuanImage's tiled_encode takes an image for a video, and fails on one device.
NO_TILES_ENCODED = ("CogVideoX", "HunyuanImage")
# What diffusers' own tiling does not do on one device: a padding by reflection of one column; tiles cut to numbers of
# latents as if of pixels.
NOT_TILED = ("LTX2Video", "HunyuanImageRefiner")
# What decodes by tiles alone.
BY_TILES = ("MiniMaxH3", "Allegro")


def fill_randomly(module: nn.Module) -> nn.Module:
    """``module`` in eval mode, with weights of which none is zero, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.1 * noise + ("weight" in name)
    return module.eval().requires_grad_(False)


@dataclass(frozen=True)
class TinyVae:
    """One autoencoder: how to make it, and the shapes of what it decodes and encodes, higher than wide."""

    cls: str
    options: Mapping[str, Any]
    latents: tuple[int, ...]
    pixels: tuple[int, ...]
    # Of the decoder, beside latents; of the encoder, beside pixels.
    conditions: Mapping[str, Any] = field(default_factory=dict)
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    # What is set on the instance after it was made.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Oobleck's weight_norm
            vae: Any = getattr(diffusers, self.cls)(**self.options)
        made = fill_randomly(vae)
        for name, value in self.settings.items():
            setattr(vae, name, value)
        return made

    def make_tiled(self) -> nn.Module:
        """With tiles of 4 × 4 latents, of which the next one begins 3 later: small enough for the images here."""
        vae: Any = self.make()
        vae.use_tiling = True
        ratio = rows_per_latent(vae)
        sizes = {
            **dict.fromkeys(("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width"), 4 * ratio),
            **dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), 3 * ratio),
            **dict.fromkeys(("tile_sample_min_overlap_height", "tile_sample_min_overlap_width"), ratio),
            **dict.fromkeys(("tile_latent_min_size", "tile_latent_min_height", "tile_latent_min_width"), 4),
        }
        for attribute, size in sizes.items():
            if hasattr(vae, attribute):
                setattr(vae, attribute, size)
        made: nn.Module = vae
        return made

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        out = vae.decode(latents, **self.conditions)
        found: Tensor = out if isinstance(out, Tensor) else out.sample
        return found

    def encode(self, vae: Any, pixels: Tensor) -> Tensor:
        out = vae.encode(pixels, **self.encoder_options)
        for name in ("latents", "latent"):
            if name in out:
                latents: Tensor = out[name]
                return latents
        found = out.latent_dist
        parameters: Tensor = found.parameters if hasattr(found, "parameters") else torch.cat([found.mean, found.logs])
        return parameters


def random_image(shape: tuple[int, ...], *, wide: bool = False, seed: int = 1) -> Tensor:
    """Numbers of ``shape``; ``wide``: its last two sizes are exchanged."""
    if wide:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _blocks(name: str, count: int) -> tuple[str, ...]:
    return (name,) * count


_KL: Mapping[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": _blocks("DownEncoderBlock2D", 2),
    "up_block_types": _blocks("UpDecoderBlock2D", 2),
    "latent_channels": 4,
    "norm_num_groups": 4,
}
_WAN: Mapping[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_LTX: Mapping[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": (8, 16, 32, 32),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 4,
    "spatial_compression_ratio": 32,
}
_HUNYUAN: Mapping[str, Any] = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}

TINY_VAES: Mapping[str, TinyVae] = {
    "KL": TinyVae("AutoencoderKL", _KL, (1, 4, 7, 5), (2, 3, 15, 10)),
    "Flux2": TinyVae("AutoencoderKLFlux2", _KL, (2, 4, 7, 5), (1, 3, 14, 10)),
    "Tiny": TinyVae(
        "AutoencoderTiny",
        {
            "in_channels": 3,
            "out_channels": 3,
            "encoder_block_out_channels": (8,) * 3,
            "decoder_block_out_channels": (8,) * 3,
            "num_encoder_blocks": (1,) * 3,
            "num_decoder_blocks": (1,) * 3,
            "latent_channels": 4,
        },
        (1, 4, 7, 5),
        (1, 3, 28, 20),
    ),
    "DC": TinyVae(
        "AutoencoderDC",
        {
            "in_channels": 3,
            "latent_channels": 8,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "upsample_block_type": "interpolate",
        },
        (1, 8, 7, 5),
        (1, 3, 14, 10),
    ),
    "HunyuanVideo": TinyVae("AutoencoderKLHunyuanVideo", _HUNYUAN, (1, 4, 2, 7, 4), (1, 3, 5, 56, 32)),
    # More frames than a tile of time has, which it decodes one after the other by default.
    "HunyuanVideo, long": TinyVae(
        "AutoencoderKLHunyuanVideo",
        _HUNYUAN,
        (1, 4, 4, 7, 4),
        (1, 3, 13, 56, 32),
        settings={"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4},
    ),
    "HunyuanVideo15": TinyVae(
        "AutoencoderKLHunyuanVideo15",
        {"block_out_channels": (8, 16, 16, 16, 16), "layers_per_block": 1, "latent_channels": 4},
        (1, 4, 2, 7, 4),
        (1, 3, 5, 112, 64),
    ),
    "Mochi": TinyVae(
        "AutoencoderKLMochi",
        {
            "latent_channels": 4,
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
        },
        (1, 4, 2, 7, 4),
        (1, 3, 7, 56, 32),
    ),
    "CogVideoX": TinyVae(
        "AutoencoderKLCogVideoX",
        {
            "block_out_channels": (8, 8, 16, 16),
            "down_block_types": _blocks("CogVideoXDownBlock3D", 4),
            "up_block_types": _blocks("CogVideoXUpBlock3D", 4),
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        (1, 4, 3, 7, 4),
        (1, 3, 5, 56, 32),
    ),
    "Wan 2.1": TinyVae("AutoencoderKLWan", _WAN, (1, 4, 2, 7, 4), (1, 3, 5, 56, 32)),
    "Wan 2.2": TinyVae(
        "AutoencoderKLWan",
        {
            **_WAN,
            "decoder_base_dim": 8,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        },
        (1, 4, 2, 7, 4),
        (1, 3, 5, 112, 64),
    ),
    "QwenImage": TinyVae("AutoencoderKLQwenImage", _WAN, (1, 4, 1, 7, 4), (1, 3, 1, 56, 32)),
    "QwenImage21": TinyVae(
        "AutoencoderKLQwenImage21",
        {
            **_WAN,
            "decoder_base_dim": 8,
            "dim_mult": [1, 2, 2, 2, 2],
            "temperal_downsample": [False, True, True, True],
        },
        (1, 4, 1, 7, 4),
        (1, 4, 1, 112, 64),
    ),
    "LTXVideo": TinyVae(
        "AutoencoderKLLTXVideo",
        {
            **_LTX,
            "block_out_channels": (8, 8, 16, 16),
            "decoder_block_out_channels": (8, 8, 16, 16),
            "decoder_layers_per_block": (1,) * 5,
        },
        (1, 8, 2, 7, 4),
        (1, 3, 9, 224, 128),
    ),
    "LTXVideo 0.9.5": TinyVae(
        "AutoencoderKLLTXVideo",
        {
            **_LTX,
            "spatio_temporal_scaling": (True,) * 4,
            "decoder_spatio_temporal_scaling": (True,) * 3,
            "decoder_inject_noise": (False,) * 4,
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            "upsample_residual": (True,) * 3,
            "upsample_factor": (2,) * 3,
            "timestep_conditioning": True,
            "down_block_types": _blocks("LTXVideo095DownBlock3D", 4),
            "encoder_causal": True,
            "decoder_causal": False,
        },
        (1, 8, 2, 7, 4),
        (1, 3, 17, 224, 128),
        conditions={"temb": torch.tensor([0.05])},
    ),
    "LTX2Video": TinyVae("AutoencoderKLLTX2Video", _LTX, (1, 8, 2, 7, 4), (1, 3, 17, 224, 128)),
    "Cosmos": TinyVae(
        "AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 16, 16, 16),
            "decode_block_out_channels": (8, 16, 16, 16),
            "attention_resolutions": (8,),
            "resolution": 64,
            "num_layers": 1,
        },
        (1, 4, 2, 7, 4),
        (1, 3, 9, 56, 32),
    ),
    "Magvit": TinyVae(
        "AutoencoderKLMagvit",
        {
            "block_out_channels": (8, 8, 16, 16),
            "down_block_types": (
                "SpatialDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
            ),
            "up_block_types": (
                "SpatialUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
            ),
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        (1, 4, 2, 7, 4),
        (1, 3, 5, 56, 32),
    ),
    "TemporalDecoder": TinyVae(
        "AutoencoderKLTemporalDecoder",
        {
            "block_out_channels": (32, 32),
            "down_block_types": _blocks("DownEncoderBlock2D", 2),
            "latent_channels": 4,
        },
        (2, 4, 7, 5),
        (2, 3, 14, 10),
        conditions={"num_frames": 2},
    ),
    "HunyuanImage": TinyVae(
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 8,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 32,
        },
        (1, 8, 7, 5),
        (1, 3, 14, 10),
    ),
    "HunyuanImageRefiner": TinyVae(
        "AutoencoderKLHunyuanImageRefiner",
        {"block_out_channels": (8, 16, 16, 16, 16), "layers_per_block": 1, "latent_channels": 4},
        (1, 4, 2, 7, 4),
        (1, 3, 5, 112, 64),
    ),
    "Oobleck": TinyVae(
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "audio_channels": 2,
        },
        (1, 4, 15),
        (1, 2, 120),
    ),
    "LTX2, sound": TinyVae(
        "AutoencoderKLLTX2Audio",
        {"base_channels": 8, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "latent_channels": 4, "mel_bins": 28},
        (1, 4, 7, 4),
        (1, 2, 28, 16),
    ),
    "LongCatAudioDiT": TinyVae(
        "LongCatAudioDiTVae",
        {
            "channels": 8,
            "c_mults": [1, 2],
            "strides": [2, 4],
            "latent_dim": 4,
            "encoder_latent_dim": 8,
            "downsampling_ratio": 8,
        },
        (1, 4, 15),
        (1, 1, 120),
        encoder_options={"sample_posterior": False},
    ),
    "Cosmos3, sound": TinyVae(
        "Cosmos3AVAEAudioTokenizer",
        {
            "vocoder_input_dim": 4,
            "dec_dim": 8,
            "dec_c_mults": (1, 2),
            "dec_strides": (4, 3),
            "enc_dim": 8,
            "enc_num_blocks": 1,
            "enc_n_fft": 8,
            "enc_hop_length": 2,
            "enc_latent_dim": 8,
            "enc_c_mults": (1, 2),
            "enc_strides": (2, 3),
        },
        (1, 4, 15),
        (1, 2, 180),
    ),
    "Kandinsky6SR": TinyVae(
        "Kandinsky6SRVAE",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 16, 32),
            "decoder_block_out_channels": (8, 16, 32),
            "layers_per_block": 1,
            "temporal_compression_ratio": 2,
        },
        (1, 4, 3, 7, 4),
        (1, 3, 5, 28, 16),
    ),
    "MiniMaxH3": TinyVae(
        "AutoencoderKLMiniMaxH3",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 16, 16),
            "layers_per_block": 1,
            "spatial_downsample_factors": (2, 2, 1),
            "temporal_downsample_factors": (1, 2, 1),
            "norm_num_groups": 4,
            "decoder_num_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
            "clip_length": 5,
            "token_drop": 1,
            "latents_mean": (0.0,) * 4,
            "latents_std": (1.0,) * 4,
        },
        (1, 4, 5, 7, 4),
        (1, 3, 10, 28, 16),
        settings={
            **dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 64),
            **dict.fromkeys(("tile_sample_min_overlap_height", "tile_sample_min_overlap_width"), 16),
        },
    ),
    "MiniMaxH3, sound": TinyVae(
        "AutoencoderKLMiniMaxH3Audio",
        {
            "encoder_dim": 8,
            "encoder_rates": (2, 5),
            "latent_dim": 16,
            "latent_channels": 4,
            "num_attention_heads": 2,
            "decoder_dim": 16,
            "decoder_rates": (5, 2),
            "decoder_kernel_sizes": (9, 4),
            "resblock_kernel_sizes": (3, 7),
            "resblock_dilation_sizes": ((1, 3), (1, 5)),
        },
        (2, 4, 15),
        (2, 1, 150),
    ),
    "KVAE": TinyVae(
        "AutoencoderKLKVAE",
        {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 2)},
        (1, 4, 7, 5),
        (1, 3, 14, 10),
    ),
    "KVAE, video": TinyVae(
        "AutoencoderKLKVAEVideo",
        {"ch": 32, "ch_mult": (1, 1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        (1, 4, 3, 7, 4),
        (1, 3, 5, 28, 16),
    ),
    "KVAE, sound": TinyVae(
        "AutoencoderKLKVAEAudio",
        {
            "encoder_dim": 8,
            "encoder_rates": [2, 3],
            "latent_dim": 16,
            "codebook_dim": 4,
            "decoder_dim": 16,
            "decoder_rates": [3, 2],
            "attn_num_heads": 2,
        },
        (1, 4, 15),
        (1, 1, 90),
    ),
    "VidTok": TinyVae(
        "AutoencoderVidTok",
        {"ch": 8, "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1},
        (1, 4, 2, 7, 4),
        (1, 3, 8, 56, 32),
    ),
    "Allegro": TinyVae(
        "AutoencoderKLAllegro",
        {
            "block_out_channels": (8, 8, 16, 16),
            "down_block_types": _blocks("AllegroDownBlock3D", 4),
            "up_block_types": _blocks("AllegroUpBlock3D", 4),
            "temporal_downsample_blocks": (True, True, False, False),
            "temporal_upsample_blocks": (False, True, True, False),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        (1, 4, 2, 7, 4),
        (1, 3, 8, 56, 32),
        settings={"use_tiling": True, "kernel": (8, 32, 32), "stride": (4, 24, 24)},
    ),
}
