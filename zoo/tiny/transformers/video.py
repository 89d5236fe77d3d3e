"""Tiny transformers of video, beside those of `zoo.tiny.transformers.registry`: Kandinsky, Cosmos, EasyAnimate,
ConsisID, AnyFlow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from zoo.tiny.base import TinyModel, noise, valid


def kandinsky_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, frames, height, width, 4),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600.0, 600.0]),
        "pooled_projections": noise(2, 20),
        "visual_rope_pos": [torch.arange(size) for size in (frames, height // 2, width // 2)],
        "text_rope_pos": torch.arange(9),
    }


def cosmos_inputs(frames: int, height: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, 9, 24),
        "fps": 16,
        **more,
    }


def cosmos_given_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """The first frame is given: a time step for each."""
    timestep = torch.full((2, 1, frames, 1, 1), 0.6)
    timestep[:, :, 0] = 0.1
    return cosmos_inputs(
        frames, height, width, timestep=timestep, condition_mask=noise(2, 1, frames, height, width, seed=1)
    )


def cosmos_transfer_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Of 2.5: text and tokens of an image, and residuals of a ControlNet."""
    tokens = frames * (height // 2) * (width // 2)
    return cosmos_inputs(
        frames,
        height,
        width,
        encoder_hidden_states=(noise(2, 9, 24), noise(2, 5, 20)),
        block_controlnet_hidden_states=[noise(2, tokens, 36, seed=i) for i in range(2)],
    )


COSMOS: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "adaln_lora_dim": 8,
    "max_size": (16, 32, 32),
    # Resizing it needs torchvision.
    "concat_padding_mask": False,
}


def cosmos3_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Text, then video, of which the first of several frames is given."""
    shape = (frames, height // 2, width // 2)
    text, video = 7, shape[0] * shape[1] * shape[2]
    noisy = torch.arange(1 if frames > 1 else 0, frames)
    places = torch.arange(video).view(frames, -1)[noisy].flatten() + text
    grid = torch.cartesian_prod(*[torch.arange(size) for size in shape]) + text
    return {
        "input_ids": torch.arange(text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text)[:, None].expand(-1, 3), grid]).T,
        "und_len": text,
        "sequence_length": text + video,
        "vision_tokens": [noise(1, 4, frames, height, width)],
        "vision_token_shapes": [shape],
        "vision_sequence_indexes": torch.arange(text, text + video),
        "vision_mse_loss_indexes": places,
        "vision_timesteps": torch.full((len(places),), 600.0),
        "vision_noisy_frame_indexes": [noisy],
    }


def easyanimate_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_hidden_states_t5": noise(2, 5, 20),
    }


def consisid_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    tokens = frames * (height // 2) * (width // 2)
    angles = noise(tokens, 16)
    return {
        "hidden_states": noise(2, frames, 4, height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600, 600]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "id_cond": noise(2, 12),
        "id_vit_hidden": [noise(2, 5, 16, seed=i) for i in range(2)],
    }


def anyflow_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    timestep = torch.linspace(900, 500, frames).expand(2, -1)
    return {
        "hidden_states": noise(2, frames, 4, height, width),
        "timestep": timestep,
        "r_timestep": timestep - 100.0,
        "encoder_hidden_states": noise(2, 9, 24),
    }


def anyflow_far_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """A chunk for each frame; those before the last two are compressed."""
    return {**anyflow_inputs(frames, height, width), "chunk_partition": [1] * frames}


def wan_animate_2_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """The reference pass, of one sample: it keeps keys for the steps that come next."""
    tokens = frames * (height // 2) * (width // 2)
    grid = torch.tensor([[frames, height // 2, width // 2]])
    return {
        "hidden_states": [noise(4, frames, height, width)],
        "condition_latents": [noise(4, frames, height, width, seed=1)],
        "timestep": torch.tensor([600.0]),
        "encoder_hidden_states": [noise(9, 24)],
        "encoder_hidden_states_image": noise(1, 5, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": tokens,
        "offset_grid_sizes": grid,
    }


def wan_animate_2_step(frames: int, height: int, width: int, kv_cache: WanAnimate2KVCache) -> dict[str, Any]:
    """A denoising step after :func:`wan_animate_2_inputs`: of one frame more, which no reference frame goes with."""
    inputs = wan_animate_2_inputs(frames + 1, height, width)
    inputs.pop("offset_grid_sizes")
    return {
        **inputs,
        "kv_cache": kv_cache,
        "kv_cache_mode": "cached",
        "reference_grid_sizes": torch.tensor([[frames, height // 2, width // 2]]),
        "origin_len": 4 * frames - 3,
        "origin_area": [8 * height, 8 * width],
    }


def kandinsky6_sr_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Rows and columns in eights."""
    size = 8 * -(-height // 8), 8 * -(-width // 8)
    return {"hidden_states": noise(2, frames, *size, 9), "timestep": torch.tensor([600.0, 600.0])}


def allegro_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Of four times as many tokens: the model fails on a single one."""
    height, width = 4 * height, 2 * width
    shape = (frames, height // 2, width // 2)
    angles = [noise(size, 4) for size in shape]
    places = torch.cartesian_prod(*[torch.arange(size) for size in shape]).T
    seen = torch.ones(2, frames, height, width)
    seen[1, :, : height // 2] = 0.0
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600, 600]),
        "attention_mask": seen,
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
        "image_rotary_emb": (tuple((a.cos(), a.sin()) for a in angles), tuple(place[None] for place in places)),
    }


def kandinsky6_inputs(frames: int, height: int, width: int, *, sound: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, frames, height, width, 4),
        "encoder_hidden_states": noise(2, 9, 24),
        "pooled_projections": noise(2, 20),
        "timestep": torch.tensor([600.0, 600.0]),
        "audio_hidden_states": noise(2, sound, 8) if sound else None,
    }


KANDINSKY6: dict[str, Any] = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 20,
    "time_dim": 16,
    "model_dim": 36,
    "ff_dim": 48,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
    "visual_cond": False,
    "in_audio_dim": 8,
    "out_audio_dim": 8,
}


def sana_video_inputs(frames: int, height: int, width: int, *, given: bool = False) -> dict[str, Any]:
    """``given``: the first of twice as many frames, by time steps of tokens."""
    frames *= 1 + given
    timestep = torch.full((2, 1, frames, height // 2, width // 2), 600.0)
    timestep[:, :, 0] = 0
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
        "timestep": timestep if given else torch.tensor([600, 600]),
    }


SANA_VIDEO: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 18,
    "cross_attention_dim": 36,
    "caption_channels": 24,
}


def motif_inputs(frames: int, height: int, width: int, *, image: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 6, frames, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 4), 9),
        "image_embeds": noise(2, image, 20) if image else None,
    }


MOTIF: dict[str, Any] = {
    "in_channels": 6,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 3,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "rope_axes_dim": (4, 4, 4),
}


def latte_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """Always of three frames, for which it has positions; each is as high as all frames together."""
    return {
        "hidden_states": noise(2, 4, 3, frames * height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
    }


LATTE: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 36,
    "sample_size": 8,
    "patch_size": 2,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "caption_channels": 24,
    "video_length": 3,
}

VIDEO_MODELS = {
    "kandinsky 5": TinyModel(
        "Kandinsky5Transformer3DModel",
        kandinsky_inputs,
        {
            "in_visual_dim": 4,
            "in_text_dim": 24,
            "in_text_dim2": 20,
            "time_dim": 16,
            "out_visual_dim": 4,
            "model_dim": 36,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
        },
    ),
    "cosmos": TinyModel("CosmosTransformer3DModel", cosmos_inputs, COSMOS),
    "cosmos, given frames": TinyModel("CosmosTransformer3DModel", cosmos_given_inputs, {**COSMOS, "in_channels": 5}),
    "cosmos 2.5, transfer": TinyModel(
        "CosmosTransformer3DModel",
        cosmos_transfer_inputs,
        {
            **COSMOS,
            "extra_pos_embed_type": None,
            "controlnet_block_every_n": 1,
            "img_context_dim_in": 20,
            "img_context_num_tokens": 5,
            "img_context_dim_out": 36,
        },
    ),
    "cosmos 3": TinyModel(
        "Cosmos3OmniTransformer",
        cosmos3_inputs,
        {
            "head_dim": 12,
            "hidden_size": 32,
            "intermediate_size": 48,
            "latent_channel": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "patch_latent_dim": 16,
            "vocab_size": 32,
            "rope_axes_dim": (2, 2, 2),
        },
    ),
    "easyanimate": TinyModel(
        "EasyAnimateTransformer3DModel",
        easyanimate_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 3,
            "mmdit_layers": 2,
            "time_embed_dim": 16,
            "text_embed_dim": 24,
            "text_embed_dim_t5": 20,
        },
    ),
    "consisid": TinyModel(
        "ConsisIDTransformer3DModel",
        consisid_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 24,
            "num_layers": 2,
            "sample_width": 10,
            "sample_height": 6,
            "max_text_seq_length": 9,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 8,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 12,
            "LFE_vit_dim": 16,
            "LFE_depth": 2,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 4,
            "LFE_output_dim": 32,
            "LFE_num_scale": 2,
        },
    ),
    "anyflow": TinyModel(
        "AnyFlowTransformer3DModel",
        anyflow_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 24,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
    ),
    "anyflow far": TinyModel(
        "AnyFlowFARTransformer3DModel",
        anyflow_far_inputs,
        {
            "num_attention_heads": 4,
            "attention_head_dim": 12,
            "full_chunk_limit": 2,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 24,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
    ),
    "wan animate 2": TinyModel(
        "WanAnimate2Transformer3DModel",
        wan_animate_2_inputs,
        {
            "text_len": 12,
            "in_dim": 8,
            "dim": 48,
            "ffn_dim": 48,
            "freq_dim": 32,
            "text_dim": 24,
            "out_dim": 4,
            "num_heads": 4,
            "num_layers": 2,
        },
    ),
    "kandinsky 6 sr": TinyModel(
        "Kandinsky6SRTransformer3DModel",
        kandinsky6_sr_inputs,
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 64,
            "ff_dim": 48,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
            "nabla_threshold": 0.3,
            "nabla_window": (1, 1, 1),
        },
    ),
    "allegro": TinyModel(
        "AllegroTransformer3DModel",
        allegro_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "num_layers": 2,
            "cross_attention_dim": 36,
            "caption_channels": 24,
        },
    ),
    "kandinsky 6": TinyModel("Kandinsky6Transformer3DModel", kandinsky6_inputs, KANDINSKY6),
    "kandinsky 6, with sound": TinyModel(
        "Kandinsky6Transformer3DModel", partial(kandinsky6_inputs, sound=7), {**KANDINSKY6, "ca_rope": True}
    ),
    "sana video": TinyModel("SanaVideoTransformer3DModel", sana_video_inputs, SANA_VIDEO),
    "sana video, image": TinyModel("SanaVideoTransformer3DModel", partial(sana_video_inputs, given=True), SANA_VIDEO),
    "motif": TinyModel("MotifVideoTransformer3DModel", motif_inputs, {**MOTIF, "num_decoder_layers": 2}),
    "motif, image": TinyModel(
        "MotifVideoTransformer3DModel",
        partial(motif_inputs, image=5),
        {
            **MOTIF,
            "num_decoder_layers": 1,
            "image_embed_dim": 20,
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
    ),
    "latte": TinyModel("LatteTransformer3DModel", latte_inputs, LATTE),
}
