"""Tiny transformers: a small config that follows from the signature of the class, and random inputs for one call."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import diffusers
import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def fill(module: Module, seed: int) -> Module:
    """Set random values that are the same in every process and keep activations near 1. Return ``module`` in eval
    mode.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))
            else:
                # The parameter is the scale of a norm, or a bias.
                parameter.copy_(0.2 * noise + (1.0 if name.endswith(("weight", "gamma")) else 0.0))
    return module.eval().requires_grad_(False)


# Widths are multiples of 32, because a CPU computes whole vectors of an elementwise function by one algorithm and the
# elements after the last whole vector by another one. With other widths the bits of an activation would depend on how
# many tokens a rank has.
HEAD_DIM = 32
WIDTH = 3 * HEAD_DIM
TEXT_WIDTH = 64
# This is also the width of pooled embeddings.
IMAGE_WIDTH = 32
SECOND_TEXT_WIDTH = 32

# These are small values of config fields, and a class takes those that it has. Three heads divide by neither two nor
# four ranks, and two layers of each kind show how hidden states pass from one list of blocks to the next.
_BY_VALUE: dict[Any, str] = {
    1: "num_refiner_layers n_refiner_layers num_text_blocks patch_size_t cross_attn_interval num_layerwise_text_blocks "
    "num_refiner_text_blocks perceiver_num_layers",
    2: "num_layers num_single_layers n_layers num_visual_blocks num_hidden_layers depth num_key_value_heads "
    "num_cross_attention_heads LFE_depth LFE_num_heads LFE_num_id_token LFE_num_scale approximator_layers "
    "cross_attn_num_heads dit_depth face_encoder_num_heads full_chunk_limit gist_min_text_len gist_step "
    "inject_face_latents_blocks mmdit_layers num_key_value_attention_heads num_kv_heads num_mmdit_layers "
    "num_single_dit_layers rope_freq_dim text_num_attention_heads text_num_key_value_heads",
    3: "num_attention_heads num_heads n_heads n_kv_heads audio_num_attention_heads dit_heads min_num_gist_tokens "
    "num_memory_tokens num_text_layers sliding_window video_length",
    4: "in_channels out_channels in_visual_dim out_visual_dim LFE_num_querie audio_acoustic_hidden_dim io_channels "
    "latent_channel latent_channels latent_dim motion_dim num_experts out_dim",
    8: "audio_in_channels audio_out_channels in_audio_dim in_dim motion_encoder_size out_audio_dim",
    12: "gist_max_text_len",
    16: "cond_in_channels patch_latent_dim prior_vq_quantizer_codebook_size rotary_dim",
    32: "head_dim attention_head_dim audio_attention_head_dim LFE_dim_head LFE_id_dim LFE_vit_dim "
    "adaln_dim adaln_lora_dim condition_dim cross_attention_dim_t5 cross_attn_dim_head "
    "face_encoder_hidden_dim ff_inner_dim ffn_hidden_size fourier_embedding_dim freq_dim global_cond_dim "
    "global_states_input_dim image_embed_dim image_proj_dim in_text_dim2 intermediate_size moe_intermediate_dim "
    "motion_encoder_dim motion_style_dim multiple_of pooled_projection_dim rope_max_seq_len text_emb_dim "
    "text_embed_2_dim text_embed_dim_t5 text_encoder_dim text_intermediate_size time_dim time_embed_dim time_proj_dim "
    "time_step_dim timestep_channels timestep_embed_dim timestep_features_dim timestep_guidance_channels vocab_size",
    48: "cross_attention_head_dim",
    64: "LFE_output_dim joint_attention_dim text_embed_dim text_dim caption_channels cap_feat_dim context_in_dim "
    "in_text_dim approximator_hidden_dim approximator_num_channels cond_token_dim cross_attention_input_dim "
    "dit_text_dim encoder_hidden_size llm_features_dim text_hidden_dim text_in_dim time_embed_hidden_dim",
    96: "hidden_size dim embed_dim model_dim dit_dim cross_attention_dim audio_cross_attention_dim "
    "caption_projection_dim",
    192: "ffn_dim ff_dim",
    (8, 12, 12): "axes_dims_rope axes_dims rope_axes_dim rope_dim",
}
SMALL = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
SMALL |= dict.fromkeys(("ff_mult", "mlp_width_ratio"), 2.0)


class TinyModel:
    """A transformer class of diffusers with a small config.

    Args:
        inputs: ``inputs(frames, height, width)`` returns the keyword inputs of one call. Sizes are in latent pixels.
        tables, changes: Config fields other than those of :data:`SMALL` that the class takes; later ones win.
    """

    def __init__(
        self, cls: str, inputs: Callable[..., dict[str, Any]], *tables: dict[str, Any], **changes: Any
    ) -> None:
        self.cls, self.inputs = cls, inputs
        self.config = small_config(cls, SMALL)
        for table in (*tables, changes):
            self.config |= table

    def build(self, seed: int = 1, **changes: Any) -> nn.Module:
        return fill(getattr(diffusers, self.cls)(**self.config | changes), seed)


def small_config(cls: str, small: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``small`` that are config fields of the class."""
    fields = inspect.signature(getattr(diffusers, cls).__init__).parameters
    return {name: value for name, value in small.items() if name in fields}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def valid(lengths: tuple[int, ...], total: int = 9, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return a mask ``[B, total]`` of texts of ``lengths`` tokens."""
    return torch.tensor([[i < length for i in range(total)] for length in lengths]).to(dtype)


def samples(hidden_states: Any, timestep: Any = 600, *, text: int = 9, **more: Any) -> dict[str, Any]:
    """Return the inputs of two samples with ``text`` tokens of text. A number as ``timestep`` applies to both."""
    if not isinstance(timestep, Tensor):
        timestep = torch.tensor([timestep, timestep])
    given = {"hidden_states": hidden_states, "timestep": timestep, **more}
    return {"encoder_hidden_states": noise(2, text, TEXT_WIDTH), **given}


def inputs(hidden_states: Any, timestep: Any = 600, **more: Any) -> Callable[..., dict[str, Any]]:
    """Return a function of ``(frames, height, width, text=9)`` that returns the inputs of :func:`samples`.

    An argument that is a function is called with the sizes. Any other argument is copied.
    """
    values = {"hidden_states": hidden_states, "timestep": timestep, **more}

    def make(*size: int, text: int = 9) -> dict[str, Any]:
        arguments = {name: value(*size) if callable(value) else copy.deepcopy(value) for name, value in values.items()}
        return samples(**arguments, text=text)

    return make


# -- Values of inputs that depend on the sizes.


def video(frames: int, height: int, width: int) -> Tensor:
    return noise(2, 4, frames, height, width)


def video_by_frame(frames: int, height: int, width: int) -> Tensor:
    """Return a video whose channels follow its frames."""
    return noise(2, frames, 4, height, width)


def image(frames: int, height: int, width: int) -> Tensor:
    """Return an image as high as all frames together."""
    return noise(2, 4, frames * height, width)


def tokens(channels: int) -> Callable[..., Tensor]:
    return lambda frames, height, width: noise(2, frames * height * width, channels)


def num_patches(frames: int, height: int, width: int) -> int:
    """Return the number of tokens if each is 2 × 2 latent pixels."""
    return frames * (height // 2) * (width // 2)


def rotary(frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for patches of 2 × 2 latent pixels."""
    angles = noise(num_patches(frames, height, width), HEAD_DIM)
    return angles.cos(), angles.sin()


def residuals(blocks: int, width: int, *, patch: int = 2) -> Callable[..., list[Tensor]]:
    """Return a function that returns the residuals of a ControlNet: for each of ``blocks``, ``[2, tokens, width]``."""
    return lambda f, h, w: [noise(2, f * (h // patch) * (w // patch), width, seed=i) for i in range(blocks)]


def grid(*sizes: int) -> Tensor:
    """Return the positions ``[tokens, len(sizes)]`` of a grid in row-major order."""
    return torch.cartesian_prod(*[torch.arange(float(size)) for size in sizes])
