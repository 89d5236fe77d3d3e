"""Train the tiny video pipeline:  python -m zoo.video.train

Trains the autoencoder first, then the transformer and the text encoder together. It may be stopped at any time, and the
same command continues from the last checkpoint. The pipeline folder always has the best weights so far.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from zoo import training
from zoo.flux.models import SHIFT, build_word_tokenizer
from zoo.flux.scenes import to_tensor
from zoo.training import FlowLoss, Pool, VaeLoss, step_seed, vary
from zoo.video import scenes as grammar
from zoo.video.scenes import FRAMES, VideoScene, draw, draw_crowded

# The published weights were trained with these numbers. Each is an option of the command.
RECIPE = {
    "vae_image_steps": 3000,  # These steps train the autoencoder on images.
    "vae_steps": 2500,  # These steps train the autoencoder on videos afterwards.
    "vae_batch": 2,
    "vae_learning_rate": 2e-3,
    "scenes": 4096,  # Scenes are drawn once, and shown many times.
    "steps": 6000,
    "batch": 16,
    "learning_rate": 1e-3,
    "boost": 4.0,  # It multiplies the learning rate inside the blocks.
}
TEXT_WIDTH = 96
LATENT_CHANNELS = 16
RESIDUAL_GAIN = 0.3  # This is the initial gain of the last convolution of a block.
LOG_VARIANCE = -4.0  # This is the initial log-variance of the latents.
VAE_PATCH = 2  # pixels along each side, which are joined to channels before the first convolution
# Zeros follow the end of a caption, and nothing masks them, so the model must learn each length. Wan's default is 512.
TEXT_LENGTHS = {16: 0.75, 32: 0.17, 226: 0.05, 512: 0.03}


# -- The parts of the pipeline, freshly initialised.


def build_tokenizer() -> T5TokenizerFast:
    """Return a tokenizer in which each word of the grammar is one token."""
    return build_word_tokenizer(grammar.words())


def build_vae() -> AutoencoderKLWan:
    """Return a VAE that turns 17 × 64 × 64 pixels into 5 × 8 × 8 latent pixels: 8 × in space and 4 × in time, as Wan's
    does.

    With PyTorch's own initialisation the biases dominate the differences between pixels, which no norm here removes:
    after 1,500 steps the decoder gave the same for all latents. Therefore the convolutions keep the variance, there are
    no biases, residuals are weak, and latents begin with little noise.
    """
    blocks = {"base_dim": 16, "dim_mult": [1, 2, 4], "num_res_blocks": 1, "temperal_downsample": [True, True]}
    channels = dict.fromkeys(("in_channels", "out_channels"), 3 * VAE_PATCH**2)
    statistics = {"latents_mean": [0.0] * LATENT_CHANNELS, "latents_std": [1.0] * LATENT_CHANNELS}
    scales = {"patch_size": VAE_PATCH, "scale_factor_temporal": 4, "scale_factor_spatial": 8}
    vae = AutoencoderKLWan(z_dim=LATENT_CHANNELS, **blocks, **channels, **statistics, **scales)
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim >= 4 and "norm" not in name:
            nn.init.kaiming_normal_(parameter, nonlinearity="linear")
            if ".conv2." in name:
                parameter.data *= RESIDUAL_GAIN
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], LOG_VARIANCE)
    return vae


class WanDenoiser(nn.Module):
    """The model that flow matching trains: the transformer and the text encoder."""

    def __init__(self, tokenizer: T5TokenizerFast) -> None:
        super().__init__()
        channels = dict.fromkeys(("in_channels", "out_channels"), LATENT_CHANNELS)
        # Time, height and width get a third of the head dim each.
        heads = {"num_attention_heads": 4, "attention_head_dim": 36}
        widths = {"text_dim": TEXT_WIDTH, "freq_dim": 128, "ffn_dim": 576, "patch_size": (1, 2, 2)}
        options = {"num_layers": 8, "cross_attn_norm": True, "rope_max_seq_len": 64}
        self.transformer = WanTransformer3DModel(**channels, **heads, **widths, **options)
        sizes = {"d_model": TEXT_WIDTH, "d_kv": 24, "d_ff": 2 * TEXT_WIDTH, "num_layers": 2, "num_heads": 4}
        config = UMT5Config(vocab_size=len(tokenizer), **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0)
        self.text_encoder = UMT5EncoderModel(config)

    def encode_text(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S_text, C]`` with zeros after the end of a caption, as in WanPipeline."""
        text: torch.Tensor = self.text_encoder(ids, mask).last_hidden_state * mask[..., None]
        return text

    def forward(
        self, latents: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity, noise − data, as WanPipeline calls for it.

        Args:
            latents: noisy latents, ``[B, C, 5, 8, 8]``.
            sigma: noise level of each sample, ``[B]``, 0 (data) to 1 (noise).
            ids, mask: of the captions, ``[B, S_text]``.
        """
        text = self.encode_text(ids, mask)
        velocity: torch.Tensor = self.transformer(latents, 1000 * sigma, text, return_dict=False)[0]
        return velocity


def build_pipeline(denoiser: WanDenoiser, vae: AutoencoderKLWan, tokenizer: T5TokenizerFast) -> WanPipeline:
    """Return the parts as one plain diffusers pipeline, which shares their parameters."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    return WanPipeline(tokenizer, denoiser.text_encoder, vae, scheduler, denoiser.transformer)


# -- Videos and captions drawn from seeds, and their latents.


def draw_batch(seed: np.random.SeedSequence, batch: int) -> tuple[torch.Tensor, list[VideoScene]]:
    """Return videos of training scenes, ``[batch, 3, 17, 64, 64]`` in −1 … 1, and the scenes."""
    return training.draw_scenes(partial(grammar.random_scene, held_out=False), draw, seed, batch)


def draw_mixed_batch(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return videos ``[batch, 3, 17, 64, 64]`` for the autoencoder: one half full of objects, the other of training
    scenes.
    """
    half = batch // 2
    crowded = to_tensor([draw_crowded(np.random.default_rng(child)) for child in seed.spawn(half)])
    return torch.cat([crowded, draw_batch(seed, batch - half)[0]])


def draw_crowded_images(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return videos of one frame full of objects, ``[batch, 3, 1, 64, 64]``, from which colours are learned soonest."""
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    return to_tensor([draw_crowded(rng, range(FRAMES // 2, FRAMES // 2 + 1)) for rng in rngs])


@torch.no_grad()
def encode(vae: AutoencoderKLWan, videos: torch.Tensor) -> torch.Tensor:
    """Encode ``[B, 3, 17, 64, 64]`` in −1 … 1 to latents ``[B, C, 5, 8, 8]``, as the transformer gets them."""
    latents = vae.encode(videos.to(vae.device)).latent_dist.mean
    statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=latents.device)
    mean, std = statistics.view(2, -1, 1, 1, 1)
    return (latents - mean) / std


def measure_latents(vae: AutoencoderKLWan, seed: int, *, batches: int = 16, batch: int = 16) -> None:
    """Write mean and standard deviation of each channel of the latents of training videos into the VAE's config."""
    channels = vae.config.z_dim
    vae.register_to_config(latents_mean=[0.0] * channels, latents_std=[1.0] * channels)
    videos = [draw_batch(step_seed(seed, training.STATISTICS, i), batch)[0] for i in range(batches)]
    latents = torch.cat([encode(vae, part).transpose(0, 1) for part in videos], dim=1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())


def build_pool(vae: AutoencoderKLWan, seed: int, count: int) -> Pool:
    """Draw and encode ``count`` training scenes, all with equal weight."""
    return training.build_pool(draw_batch, partial(encode, vae), lambda scene: torch.ones(1, 1, 1, 1), seed, count, 32)


@dataclass(frozen=True)
class WanCaptions:
    """The conditions of the denoiser: ids and mask of captions, padded to one length."""

    tokenizer: T5TokenizerFast

    def __call__(self, scenes: list[VideoScene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask, each ``[B, S_text]``."""
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        length = int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values())))
        tokens = self.tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return tokens.input_ids, tokens.attention_mask


# -- The stages.


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKLWan, float]:
    """Return the averaged autoencoder, with the statistics of its latents in its config, and the seconds of training.

    Images come first, as for Wan's (arXiv:2503.20314, section 4.1): a step on eight of them takes half as long as one
    on two videos.
    """
    torch.manual_seed(args.seed)
    stages = {
        "vae_images": (args.vae_image_steps, VaeLoss(args.seed, 4 * args.vae_batch, draw_crowded_images)),
        "vae": (args.vae_steps, VaeLoss(args.seed, args.vae_batch, draw_mixed_batch)),
    }
    vae, seconds = training.train_vae(args, build_vae().to(args.device), stages, average=0.99)
    measure_latents(vae.eval(), args.seed)
    return vae, seconds


def main(arguments: list[str] | None = None) -> None:
    """Run both stages."""
    args = training.parse(__doc__, Path(__file__).parent, arguments, **RECIPE)
    vae, seconds = train_vae(args)
    tokenizer = build_tokenizer()
    torch.manual_seed(args.seed + 1)
    model = WanDenoiser(tokenizer).to(args.device)
    pool = build_pool(vae, args.seed, args.scenes)
    loss = FlowLoss(pool, WanCaptions(tokenizer), args.seed, args.batch, SHIFT)
    training.train_flow(args, model, loss, vae, seconds, partial(build_pipeline, tokenizer=tokenizer))


if __name__ == "__main__":
    main()
