"""Tiny transformers of every family, with random parameters, and inputs for one call of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.tiny.base import TinyModel, noise, valid
from zoo.tiny.transformers.audio import AUDIO_MODELS
from zoo.tiny.transformers.image import IMAGE_MODELS
from zoo.tiny.transformers.joint import STREAM_MODELS
from zoo.tiny.transformers.video import VIDEO_MODELS


def wan_inputs(frames: int, height: int, width: int, *, text: int = 9, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, text, 24),
        **more,
    }


def wan_image_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    # The processor takes the last 512 of the context for text.
    more = {"encoder_hidden_states": noise(2, 512, 24), "encoder_hidden_states_image": noise(2, 5, 20)}
    return wan_inputs(frames, height, width, **more)


def wan_token_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """A time step for each token: the first frame is given."""
    tokens = frames * (height // 2) * (width // 2)
    timestep = torch.full((2, tokens), 600.0)
    timestep[:, : tokens // frames] = 0
    return wan_inputs(frames, height, width, timestep=timestep)


WAN: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def vace_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    more = {
        "control_hidden_states": noise(2, 6, frames, height, width, seed=1),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5]),
    }
    return wan_inputs(frames, height, width, **more)


def animate_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    """The first frame is the given image; each further one has four frames of a face."""
    return {
        **wan_image_inputs(frames + 1, height, width),
        "hidden_states": noise(2, 12, frames + 1, height, width),
        "pose_hidden_states": noise(2, 4, frames, height, width, seed=1),
        "face_pixel_values": noise(2, 3, 4 * frames - 3, 8, 8, seed=2),
    }


def skyreels_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return wan_inputs(frames, height, width, fps=[0, 1])


def skyreels_forcing_inputs(frames: int, height: int, width: int, *, block: int = 1) -> dict[str, Any]:
    """A time step for each frame; ``block`` times as many frames. Of one sample: diffusers takes no more with
    ``fps``.
    """
    frames *= block
    inputs = wan_inputs(frames, height, width, timestep=torch.linspace(900, 500, frames).long().expand(2, -1))
    return {**{name: value[:1] for name, value in inputs.items()}, "fps": [0], "enable_diffusion_forcing": True}


def qwen_inputs(
    frames: int, height: int, width: int, *, text: int = 9, masked: bool = False, blocks: int = 0
) -> dict[str, Any]:
    tokens = frames * height * width
    return {
        "hidden_states": noise(2, tokens, 16),
        "encoder_hidden_states": noise(2, text, 24),
        "encoder_hidden_states_mask": valid((text, text // 2), text, torch.int64) if masked else None,
        "timestep": torch.tensor([0.6, 0.6]),
        # Zeroed time steps (editing): the first image is generated, the others are given.
        "img_shapes": [[(1, height, width)] * frames] * 2,
        "controlnet_block_samples": [noise(2, tokens, 48, seed=i) for i in range(blocks)] or None,
    }


QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


def flux_inputs(frames: int, height: int, width: int, *, text: int = 9) -> dict[str, Any]:
    """An image as high as all frames together."""
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(float(frames * height)), torch.arange(float(width)))
    return {
        "hidden_states": noise(2, len(grid), 16),
        "encoder_hidden_states": noise(2, text, 24),
        "pooled_projections": noise(2, 20),
        "timestep": torch.tensor([0.6, 0.6]),
        "guidance": torch.tensor([3.5, 3.5]),
        "img_ids": grid,
        "txt_ids": torch.zeros(text, 3),
    }


def flux2_inputs(frames: int, height: int, width: int, *, text: int = 9) -> dict[str, Any]:
    grid = torch.cartesian_prod(*[torch.arange(float(size)) for size in (frames, height, width, 1)])
    places = torch.cartesian_prod(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.arange(float(text)))
    return {
        "hidden_states": noise(2, len(grid), 16),
        "encoder_hidden_states": noise(2, text, 24),
        "timestep": torch.tensor([0.6, 0.6]),
        "guidance": torch.tensor([3.5, 3.5]),
        "img_ids": grid.expand(2, -1, -1),
        "txt_ids": places.expand(2, -1, -1),
    }


def ltx_inputs(frames: int, height: int, width: int, *, by_token: bool = False) -> dict[str, Any]:
    tokens = frames * height * width
    timestep = torch.tensor([600.0, 600.0])
    if by_token:
        timestep = timestep[:, None].repeat(1, tokens)
        timestep[:, : height * width] = 0.0
    return {
        "hidden_states": noise(2, tokens, 8),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": timestep,
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


LTX: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "cross_attention_dim": 24,
    "num_layers": 2,
    "caption_channels": 24,
}


def ltx2_inputs(frames: int, height: int, width: int, *, masked: bool = False) -> dict[str, Any]:
    tokens = frames * height * width
    more = {"video_self_attention_mask": noise(2, tokens, tokens).sigmoid()} if masked else {}
    inputs = ltx_inputs(frames, height, width, by_token=True)
    return {
        **inputs,
        "audio_hidden_states": noise(2, 7, 8, seed=1),
        "audio_encoder_hidden_states": noise(2, 9, 24, seed=1),
        "audio_timestep": torch.tensor([600.0, 600.0]),
        "audio_encoder_attention_mask": inputs["encoder_attention_mask"],
        "audio_num_frames": 7,
        **more,
    }


LTX2: dict[str, Any] = {
    **LTX,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 12,
}


def helios_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    def history(number: int) -> Tensor:
        return noise(2, 4, number, height, width, seed=number)

    def indices(first: int, number: int) -> Tensor:
        return torch.arange(first, first + number)[None].expand(2, -1)

    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
        "indices_hidden_states": indices(7, frames),
        "indices_latents_history_short": indices(6, 1),
        "indices_latents_history_mid": indices(4, 2),
        "indices_latents_history_long": indices(0, 4),
        "latents_history_short": history(1),
        "latents_history_mid": history(2),
        "latents_history_long": history(4),
    }


HELIOS: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_dim": (4, 4, 4),
    "is_amplify_history": True,
}


def h3_inputs(frames: int, height: int, width: int, *, text: int = 9) -> dict[str, Any]:
    """Text, video and sound in one packed sequence."""
    video, sound = frames * height * width, 7
    total = video + text + sound
    tags = torch.tensor([1] * text + [0] * video + [2] * sound)
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width))
    places = torch.cat([torch.zeros(text, 3), grid, torch.arange(sound)[:, None].expand(-1, 3)])
    return {
        "hidden_states": noise(1, video, 16),
        "audio_hidden_states": noise(1, sound, 8),
        "encoder_hidden_states": noise(1, text, 24),
        "timestep": torch.tensor([0.6, 0.0]),
        "timestep_indices": (torch.arange(total) < text + 2).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": (tags == 0).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
        "text_indices": (tags == 1).nonzero()[:, 0],
    }


def hunyuan_inputs(frames: int, height: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([600, 600]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 2), 9, torch.int64),
        "pooled_projections": noise(2, 20),
        "guidance": torch.tensor([6000.0, 6000.0]),
        **more,
    }


HUNYUAN: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 24,
    "pooled_projection_dim": 20,
    "rope_axes_dim": (4, 4, 4),
}


def framepack_inputs(frames: int, height: int, width: int, *, batch: int = 2) -> dict[str, Any]:
    def history(number: int) -> Tensor:
        return noise(2, 4, number, height, width, seed=number)

    def indices(first: int, number: int) -> Tensor:
        return torch.arange(first, first + number)

    inputs = hunyuan_inputs(
        frames,
        height,
        width,
        image_embeds=noise(2, 3, 20),
        indices_latents=indices(7, frames),
        latents_clean=history(2),
        indices_latents_clean=indices(5, 2),
        latents_history_2x=history(2),
        indices_latents_history_2x=indices(3, 2),
        latents_history_4x=history(4),
        indices_latents_history_4x=indices(0, 4),
    )
    return {name: value if name.startswith("indices") else value[-batch:] for name, value in inputs.items()}


def hunyuan15_inputs(frames: int, height: int, width: int, *, image: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "timestep": torch.tensor([600.0, 600.0]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 2), 9, torch.int64),
        "encoder_hidden_states_2": noise(2, 4, 16),
        "encoder_attention_mask_2": valid((1, 4), 4, torch.int64),
        "image_embeds": noise(2, 3, 20) if image else torch.zeros(2, 3, 20),
    }


HUNYUAN15: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 24,
    "text_embed_2_dim": 16,
    "image_embed_dim": 20,
    "rope_axes_dim": (4, 4, 4),
}


def mochi_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames, height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600, 600]),
        "encoder_attention_mask": valid((9, 2), 9),
    }


def cogvideox_inputs(
    frames: int, height: int, width: int, *, rotary: bool, patch_t: int | None = None
) -> dict[str, Any]:
    tokens = (frames // (patch_t or 1)) * (height // 2) * (width // 2)
    angles = noise(tokens, 16)
    return {
        "hidden_states": noise(2, frames, 4, height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([600, 600]),
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }


COGVIDEOX: dict[str, Any] = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 24,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 9,
}


def sd3_inputs(frames: int, height: int, width: int, *, blocks: int = 0) -> dict[str, Any]:
    """An image as high as all frames together."""
    tokens = frames * (height // 2) * (width // 2)
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "pooled_projections": noise(2, 20),
        "timestep": torch.tensor([600.0, 600.0]),
        "block_controlnet_hidden_states": [noise(2, tokens, 48, seed=i) for i in range(blocks)] or None,
    }


SD3: dict[str, Any] = {
    "sample_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 32,
}


def auraflow_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "timestep": torch.tensor([0.6, 0.6]),
    }


def pixart_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid((9, 4), 9, torch.int64),
        "timestep": torch.tensor([600, 600]),
        "added_cond_kwargs": {"resolution": torch.full((2, 2), 96.0), "aspect_ratio": torch.full((2, 1), 1.5)},
    }


def lumina2_inputs(frames: int, height: int, width: int, *, lengths: tuple[int, int] = (9, 4)) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "timestep": torch.tensor([0.6, 0.6]),
        "encoder_hidden_states": noise(2, 9, 24),
        "encoder_attention_mask": valid(lengths, 9),
    }


def hidream_inputs(frames: int, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, frames * height, width),
        "timesteps": torch.tensor([600.0, 600.0]),
        "encoder_hidden_states_t5": noise(2, 5, 24),
        "encoder_hidden_states_llama3": noise(4, 2, 9, 20),
        "pooled_embeds": noise(2, 20),
    }


# Classes that have no whole graph alone, either.
NO_WHOLE_GRAPH = {
    "BriaFibo2Transformer2DModel": "it asks how long its texts are",
    "HunyuanVideo15Transformer3DModel": "it asks a tensor whether an image was given",
    "Lumina2Transformer2DModel": "it asks how long its texts are",
    "HiDreamImageTransformer2DModel": "it asks which experts are taken",
    "HunyuanImageTransformer2DModel": "it orders the tokens of two texts by which are valid",
    "OmniGenTransformer2DModel": "it asks a tensor",
    "QwenImage21Transformer2DModel": "it asks which tokens are of which image",
    "StableAudioDiTModel": "it warns at each call",
    "WanAnimate2Transformer3DModel": "it asks a tensor for the size of its grid",
    "ZImageTransformer2DModel": "it enters a device's context",
}

# In tests, of these the default run takes one mesh each.
SHELF = {**IMAGE_MODELS, **STREAM_MODELS, **VIDEO_MODELS, **AUDIO_MODELS}

MODELS = {
    "wan": TinyModel("WanTransformer3DModel", wan_inputs, WAN),
    "wan, image context": TinyModel(
        "WanTransformer3DModel", wan_image_inputs, {**WAN, "image_dim": 20, "added_kv_proj_dim": 36}
    ),
    "wan, a time step for each token": TinyModel("WanTransformer3DModel", wan_token_inputs, WAN),
    "wan vace": TinyModel(
        "WanVACETransformer3DModel", vace_inputs, {**WAN, "vace_layers": [0, 1], "vace_in_channels": 6}
    ),
    "wan animate": TinyModel(
        "WanAnimateTransformer3DModel",
        animate_inputs,
        {
            **WAN,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 20,
            "added_kv_proj_dim": 36,
            "motion_encoder_channel_sizes": {"4": 4, "8": 4},
            "motion_encoder_size": 8,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 8,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
    ),
    "skyreels v2": TinyModel("SkyReelsV2Transformer3DModel", skyreels_inputs, {**WAN, "inject_sample_info": True}),
    "skyreels v2, a time step for each frame": TinyModel(
        "SkyReelsV2Transformer3DModel", skyreels_forcing_inputs, {**WAN, "inject_sample_info": True}
    ),
    "skyreels v2, causal": TinyModel(
        "SkyReelsV2Transformer3DModel", partial(skyreels_forcing_inputs, block=3), {**WAN, "num_frame_per_block": 3}
    ),
    "chronoedit": TinyModel("ChronoEditTransformer3DModel", wan_inputs, WAN),
    "qwen-image": TinyModel("QwenImageTransformer2DModel", qwen_inputs, QWEN),
    "qwen-image, masked": TinyModel("QwenImageTransformer2DModel", partial(qwen_inputs, masked=True), QWEN),
    "qwen-image, controlnet": TinyModel("QwenImageTransformer2DModel", partial(qwen_inputs, blocks=2), QWEN),
    "qwen-image, editing": TinyModel("QwenImageTransformer2DModel", qwen_inputs, {**QWEN, "zero_cond_t": True}),
    "flux": TinyModel(
        "FluxTransformer2DModel",
        flux_inputs,
        {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 20,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "flux2": TinyModel(
        "Flux2Transformer2DModel",
        flux2_inputs,
        {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 24,
            "timestep_guidance_channels": 32,
            "axes_dims_rope": (4, 4, 4, 4),
        },
    ),
    "ltx": TinyModel("LTXVideoTransformer3DModel", ltx_inputs, LTX),
    "ltx, a time step for each token": TinyModel("LTXVideoTransformer3DModel", partial(ltx_inputs, by_token=True), LTX),
    "ltx2": TinyModel("LTX2VideoTransformer3DModel", ltx2_inputs, LTX2),
    "ltx2, masked, split rope": TinyModel(
        "LTX2VideoTransformer3DModel", partial(ltx2_inputs, masked=True), {**LTX2, "rope_type": "split"}
    ),
    "helios": TinyModel("HeliosTransformer3DModel", helios_inputs, HELIOS),
    "helios, no guidance of text": TinyModel(
        "HeliosTransformer3DModel", helios_inputs, {**HELIOS, "guidance_cross_attn": False}
    ),
    "minimax-h3": TinyModel(
        "MiniMaxH3Transformer3DModel",
        h3_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 8,
            "text_dim": 24,
            "freq_dim": 16,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
    ),
    "hunyuan": TinyModel("HunyuanVideoTransformer3DModel", hunyuan_inputs, HUNYUAN),
    "hunyuan, image by token replacement": TinyModel(
        "HunyuanVideoTransformer3DModel", hunyuan_inputs, {**HUNYUAN, "image_condition_type": "token_replace"}
    ),
    "framepack": TinyModel(
        "HunyuanVideoFramepackTransformer3DModel",
        framepack_inputs,
        {**HUNYUAN, "has_image_proj": True, "image_proj_dim": 20, "has_clean_x_embedder": True},
    ),
    "framepack, one sample": TinyModel(
        "HunyuanVideoFramepackTransformer3DModel",
        partial(framepack_inputs, batch=1),
        {**HUNYUAN, "has_image_proj": True, "image_proj_dim": 20, "has_clean_x_embedder": True},
    ),
    "hunyuan 1.5": TinyModel("HunyuanVideo15Transformer3DModel", partial(hunyuan15_inputs, image=False), HUNYUAN15),
    "hunyuan 1.5, image": TinyModel(
        "HunyuanVideo15Transformer3DModel", partial(hunyuan15_inputs, image=True), HUNYUAN15
    ),
    "mochi": TinyModel(
        "MochiTransformer3DModel",
        mochi_inputs,
        {
            "patch_size": 2,
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 24,
            "time_embed_dim": 8,
            "max_sequence_length": 9,
        },
    ),
    "cogvideox": TinyModel("CogVideoXTransformer3DModel", partial(cogvideox_inputs, rotary=False), COGVIDEOX),
    "cogvideox, rotary": TinyModel(
        "CogVideoXTransformer3DModel",
        partial(cogvideox_inputs, rotary=True),
        {**COGVIDEOX, "use_rotary_positional_embeddings": True},
    ),
    "cogvideox 1.5": TinyModel(
        "CogVideoXTransformer3DModel",
        partial(cogvideox_inputs, rotary=True, patch_t=2),
        {
            **COGVIDEOX,
            "use_rotary_positional_embeddings": True,
            "patch_size_t": 2,
            "patch_bias": False,
            "ofs_embed_dim": None,
        },
    ),
    "sd3": TinyModel("SD3Transformer2DModel", sd3_inputs, SD3),
    "sd3.5, controlnet": TinyModel(
        "SD3Transformer2DModel",
        partial(sd3_inputs, blocks=2),
        {**SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
    ),
    "auraflow": TinyModel(
        "AuraFlowTransformer2DModel",
        auraflow_inputs,
        {
            "sample_size": 16,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 24,
            "caption_projection_dim": 48,
            "pos_embed_max_size": 1024,
        },
    ),
    "pixart": TinyModel(
        "PixArtTransformer2DModel",
        pixart_inputs,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "caption_channels": 24,
            "sample_size": 128,
        },
    ),
    "lumina2": TinyModel(
        "Lumina2Transformer2DModel",
        lumina2_inputs,
        {
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 24,
        },
    ),
    "hidream": TinyModel(
        "HiDreamImageTransformer2DModel",
        hidream_inputs,
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "caption_channels": [24, 20],
            "text_emb_dim": 20,
            "axes_dims_rope": (4, 6, 6),
            "max_resolution": (32, 32),
            "llama_layers": [0, 1, 2, 3],
            "force_inference_output": True,
        },
    ),
    **SHELF,
}
