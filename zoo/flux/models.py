"""The parts of the tiny pipeline, freshly initialised: what each is made of stands here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from zoo.flux import scenes as grammar

SHIFT = 3.0  # of the noise levels, in training and in the scheduler
CLIP_LENGTH = 77
CLIP_WIDTH = 64
T5_WIDTH = 128
HEADS, HEAD_DIM = 4, 32  # of the transformer's attention
LATENT_CHANNELS = 16  # as FLUX; 2 × 2 latent pixels make one token of 64 channels


@dataclass(frozen=True)
class Tokenizers:
    """``clip`` feeds the pooled embedding, ``t5`` the text tokens."""

    clip: CLIPTokenizer
    t5: T5TokenizerFast


def build_clip_tokenizer() -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer. A word of the grammar is one token or a few, and any other word is spelled in
    letters.

    The merges are written down, not trained: `BpeTrainer` breaks ties by a hash that differs from process to process.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges: dict[tuple[str, str], None] = {}
    for word in grammar.words():
        *head, last = word
        # r + e, re + d</w>: from the left, so that words with the same beginning share merges.
        left = ""
        for piece in (*head, f"{last}</w>"):
            if left:
                merges[left, piece] = None
            left += piece
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(["<|startoftext|>", "<|endoftext|>", *dict.fromkeys(pieces)])}
    return CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=CLIP_LENGTH)


def build_word_tokenizer(words: list[str]) -> T5TokenizerFast:
    """Return a tokenizer in which each of the words, also capitalized, is one token, and others are ``<unk>``."""
    pieces = [piece for word in words for piece in (f"▁{word}", f"▁{word.capitalize()}") if word != ","] + [","]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((piece, -1.0) for piece in pieces)]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def build_tokenizers() -> Tokenizers:
    """Return both tokenizers; nothing in them is random."""
    return Tokenizers(build_clip_tokenizer(), build_word_tokenizer(grammar.words()))


def build_vae() -> AutoencoderKL:
    """Return a VAE with three downsamplings, as FLUX: 128 × 128 pixels to 16 × 16 latents of 16 channels, 64 tokens."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=128,
        **dict.fromkeys(("mid_block_add_attention", "use_quant_conv", "use_post_quant_conv"), False),
    )


class FluxDenoiser(nn.Module):
    """The model that flow matching trains: the transformer and both text encoders."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        super().__init__()
        layers = {"num_layers": 3, "num_single_layers": 5, "guidance_embeds": False}
        heads = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "axes_dims_rope": (8, 12, 12)}
        widths = {"joint_attention_dim": T5_WIDTH, "pooled_projection_dim": CLIP_WIDTH}
        self.transformer = FluxTransformer2DModel(in_channels=4 * LATENT_CHANNELS, **layers, **heads, **widths)
        clip, t5 = tokenizers.clip, tokenizers.t5
        widths = {"hidden_size": CLIP_WIDTH, "intermediate_size": 2 * CLIP_WIDTH, "projection_dim": CLIP_WIDTH}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": CLIP_LENGTH}
        ids = {name: getattr(clip, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.text_encoder = CLIPTextModel(CLIPTextConfig(vocab_size=len(clip), **widths, **layers, **ids))
        sizes = {"d_model": T5_WIDTH, "d_kv": 32, "d_ff": 2 * T5_WIDTH, "num_layers": 2, "num_heads": 4}
        config = T5Config(vocab_size=len(t5), **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0)
        self.text_encoder_2 = T5EncoderModel(config)

    def forward(
        self, tokens: torch.Tensor, sigma: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity, noise − data, as FluxPipeline asks for it.

        Args:
            tokens: noisy packed latents of square images, ``[B, S, 16]``.
            sigma: noise level of each, ``[B]``, 0 (data) to 1 (noise).
            clip_ids: ``[B, 77]``.
            t5_ids: ``[B, S_text]``, padded; as in FLUX, nothing masks the padding.
        """
        side = math.isqrt(tokens.shape[1])
        velocity: torch.Tensor = self.transformer(
            hidden_states=tokens,
            encoder_hidden_states=self.text_encoder_2(t5_ids)[0],
            pooled_projections=self.text_encoder(clip_ids).pooler_output,
            timestep=sigma,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, tokens.device, torch.float32),
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=tokens.device),
            return_dict=False,
        )[0]
        return velocity


def build_pipeline(denoiser: FluxDenoiser, vae: AutoencoderKL, tokenizers: Tokenizers) -> FluxPipeline:
    """Return the parts as one plain diffusers pipeline. It shares their parameters."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=denoiser.text_encoder,
        tokenizer=tokenizers.clip,
        text_encoder_2=denoiser.text_encoder_2,
        tokenizer_2=tokenizers.t5,
        transformer=denoiser.transformer,
    )
