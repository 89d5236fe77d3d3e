"""The parts of the tiny video pipeline, freshly initialised."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from zoo.flux.models import build_word_tokenizer
from zoo.video import grammar

SHIFT = 3.0  # of the noise levels, in training and in the scheduler
TEXT_WIDTH = 96
LATENT_CHANNELS = 16
RESIDUAL_GAIN = 0.3  # of the last convolution of a block, at first
LOG_VARIANCE = -4.0  # of the latents, at first
VAE_PATCH = 2  # pixels, each way: joined to channels before the first convolution


def build_tokenizer() -> T5TokenizerFast:
    """Return a tokenizer in which each word of the grammar is one token."""
    return build_word_tokenizer(grammar.words())


def build_vae() -> AutoencoderKLWan:
    """Return a VAE that makes 5 × 8 × 8 latent pixels of 17 × 64 × 64 pixels: 8 × in space, 4 × in time, as Wan's.

    With PyTorch's own initialisation the biases drown what differs from pixel to pixel, which no norm here removes:
    after 1,500 steps the decoder said the same of all latents. So: convolutions that keep the variance, no biases, weak
    residuals, and latents that begin with little noise.
    """
    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=VAE_PATCH,
        in_channels=3 * VAE_PATCH**2,
        out_channels=3 * VAE_PATCH**2,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim >= 4 and "norm" not in name:
            nn.init.kaiming_normal_(parameter, nonlinearity="linear")
            if ".conv2." in name:
                parameter.data *= RESIDUAL_GAIN
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], LOG_VARIANCE)
    return vae


class Denoiser(nn.Module):
    """The model that flow matching trains: the transformer and the text encoder."""

    def __init__(self, tokenizer: T5TokenizerFast) -> None:
        super().__init__()
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=36,  # a third each for time, height and width
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=128,
            ffn_dim=576,
            num_layers=8,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
        self.text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_WIDTH,
                d_kv=24,
                d_ff=2 * TEXT_WIDTH,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
            )
        )

    def encode_text(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S_text, C]``, zeros past the end of a caption, as in WanPipeline."""
        text: torch.Tensor = self.text_encoder(ids, mask).last_hidden_state * mask[..., None]
        return text

    def forward(
        self, latents: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity, noise − data, as WanPipeline asks for it.

        Args:
            latents: noisy, ``[B, C, 5, 8, 8]``.
            sigma: noise level of each, ``[B]``, 0 (data) to 1 (noise).
            ids, mask: of the captions, ``[B, S_text]``.
        """
        velocity: torch.Tensor = self.transformer(
            hidden_states=latents,
            timestep=1000 * sigma,
            encoder_hidden_states=self.encode_text(ids, mask),
            return_dict=False,
        )[0]
        return velocity


def build_pipeline(denoiser: Denoiser, vae: AutoencoderKLWan, tokenizer: T5TokenizerFast) -> WanPipeline:
    """Return the parts as one plain diffusers pipeline. It shares their parameters."""
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=denoiser.text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=denoiser.transformer,
    )
