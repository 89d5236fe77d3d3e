"""Tiny random models of the classes of ``comfy/ldm``, and the arguments with which ComfyUI calls them.

Importing this module needs ComfyUI on ``sys.path``: see `benchmarks.comfyui.classes`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Frames, height and width of the latent, in its pixels, of the two calls that are shown to propose_plan.
SHOWN = ((3, 10, 14), (3, 10, 18))
Inputs = Mapping[str, Any]
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A class of ``comfy/ldm``, the arguments of its constructor, and those of a call.

    Args:
        name: The model as users know it.
        cls: Module below ``comfy.ldm``, and class: ``"wan.model.WanModel"``.
        config: Arguments of the constructor.
        inputs: Returns the arguments of a call for a number of frames, a height and a width.
        variants: The same with further arguments, by what they are for.
        shown: The two sizes that are shown to propose_plan.
        sizes: The sizes of the comparison, if the model does not accept the usual ones.
        stubs: Functions in place of methods that take minutes on a CPU, before the tokens are split.
    """

    name: str
    cls: str
    config: Inputs
    inputs: Callable[[Size], Inputs]
    variants: Mapping[str, Callable[[Size], Inputs]] = field(default_factory=dict)
    shown: tuple[Size, Size] = SHOWN
    sizes: tuple[Size, ...] = ()
    stubs: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Return the model with random weights in float32, the same for every call."""
        import comfy.ops

        path, _, name = f"comfy.ldm.{self.cls}".rpartition(".")
        cls = getattr(importlib.import_module(path), name)
        model = cls(**self.config, device="cpu", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
        for name, stub in self.stubs.items():
            owner, _, method = name.rpartition(".")
            setattr(model.get_submodule(owner), method, stub)
        return randomize(model.float().eval().requires_grad_(False))


def randomize(model: nn.Module) -> nn.Module:
    """Fill all parameters of ``model`` with random numbers that keep the scale of activations, and return it."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise / max(1, parameter[0].numel()) ** 0.5)
        elif "norm" in name or name.endswith(("scale", "gamma")):
            parameter.data.copy_(1 + 0.1 * noise)
        else:
            parameter.data.copy_(0.1 * noise)
    return model


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def time_of(samples: int = 1) -> Tensor:
    return torch.full((samples,), 0.7)


# -- Wan

WAN = {"dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 20, "num_heads": 4, "num_layers": 2}


def wan_inputs(size: Size, channels: int = 16) -> Inputs:
    return {
        "x": noise(1, channels, *size),
        "timestep": 1000 * time_of(),
        "context": noise(1, 6, 20, seed=2),
        "transformer_options": {},
    }


def wan_faces(size: Size) -> Inputs:
    return {**wan_inputs(size, 36), "clip_fea": noise(1, 257, 1280, seed=3)}


def wan_last_frame(size: Size) -> Inputs:
    return {**wan_inputs(size, 36), "clip_fea": noise(1, 514, 1280, seed=3)}


def wan_times_of_frames(size: Size) -> Inputs:
    return {**wan_inputs(size), "timestep": 1000 * torch.linspace(0.1, 0.9, size[0])[None]}


def wan_concatenated(size: Size) -> Inputs:
    return {**wan_inputs(size), "time_dim_concat": noise(1, 16, 1, *size[1:], seed=5)}


def wan_contexts(size: Size) -> Inputs:
    return {**wan_inputs(size), "context_latents": [noise(1, 16, 1, 6, 8, seed=5), noise(1, 16, 2, 4, 6, seed=6)]}


def wan_reference(size: Size) -> Inputs:
    return {**wan_inputs(size), "reference_latent": noise(1, 16, *size[1:], seed=5)}


# -- FLUX

FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 20,
    "context_in_dim": 24,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
FLUX2 = {
    **FLUX,
    "in_channels": 32,
    "out_channels": 32,
    "vec_in_dim": None,
    "axes_dim": [4, 4, 4, 4],
    "theta": 2000,
    "patch_size": 1,
    "qkv_bias": False,
    "txt_ids_dims": [3],
    "global_modulation": True,
    "mlp_silu_act": True,
    "ops_bias": False,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "mlp_ratio": 3.0,
}


def flux_inputs(size: Size, channels: int = 16, pooled: bool = True) -> Inputs:
    return {
        "x": noise(1, channels, *size[1:]),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        **({"y": noise(1, 20, seed=3)} if pooled else {}),
        "guidance": torch.full((1,), 3.5),
        "transformer_options": {},
    }


def flux2_inputs(size: Size) -> Inputs:
    return flux_inputs((1, size[1] // 2, size[2] // 2), 32, pooled=False)


def residuals(size: Size, blocks: int, width: int, patch: int = 2, frames: int = 1) -> list[Tensor | None]:
    """Return residuals of a ControlNet for ``blocks`` blocks, none for the second one."""
    tokens = frames * ((size[1] + 1) // patch) * ((size[2] + 1) // patch)
    return [None if i == 1 else noise(1, tokens, width, seed=10 + i) for i in range(blocks)]


def flux_control(size: Size) -> Inputs:
    control = {"input": residuals(size, 2, 48), "output": residuals(size, 3, 48)}
    return {**flux_inputs(size), "control": control}


def flux_references(size: Size) -> Inputs:
    return {**flux_inputs(size), "ref_latents": [noise(1, 16, 6, 8, seed=5), noise(1, 16, 4, 6, seed=6)]}


def flux_references_at_zero(size: Size) -> Inputs:
    return {**flux_references(size), "ref_latents_method": "index_timestep_zero"}


def flux2_references(size: Size) -> Inputs:
    return {**flux2_inputs(size), "ref_latents": [noise(1, 32, 3, 4, seed=5)]}


def flux_controlled_references(size: Size) -> Inputs:
    return {**flux_references(size), **flux_control(size), "ref_latents": [noise(1, 16, 6, 8, seed=5)]}


# -- Chroma

CHROMA = {
    "in_channels": 64,
    "out_channels": 64,
    "context_in_dim": 24,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "in_dim": 64,
    "out_dim": 48,
    "hidden_dim": 40,
    "n_layers": 2,
    "txt_ids_dims": [],
    "vec_in_dim": None,
}


def chroma_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size[1:]),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "guidance": torch.zeros(1),
        "transformer_options": {},
    }


def chroma_control(size: Size) -> Inputs:
    control = {"input": residuals(size, 2, 48), "output": residuals(size, 3, 48)}
    return {**chroma_inputs(size), "control": control}


# -- Qwen-Image

QWEN = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 6, 6),
}


def qwen_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, 1, *size[1:]),
        "timesteps": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


def qwen_mask(size: Size) -> Inputs:
    return {**qwen_inputs(size), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}


def qwen_references(size: Size) -> Inputs:
    return {**qwen_inputs(size), "ref_latents": [noise(1, 16, 1, 6, 8, seed=5)], "ref_latents_method": "index"}


def qwen_references_at_zero(size: Size) -> Inputs:
    return {**qwen_references(size), "ref_latents_method": "index_timestep_zero"}


def qwen_control(size: Size) -> Inputs:
    return {**qwen_inputs(size), "control": {"input": residuals(size, 2, 48)}}


# -- HunyuanVideo

HUNYUAN = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 20,
    "context_in_dim": 24,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 256,
    "patch_size": [1, 2, 2],
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}


EVEN = ((3, 14, 10), (1, 6, 8), (2, 10, 12))  # for models that do not pad


def hunyuan_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "y": noise(1, 20, seed=3),
        "guidance": torch.full((1,), 3.5),
        "transformer_options": {},
    }


def hunyuan_mask(size: Size) -> Inputs:
    return {**hunyuan_inputs(size), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}


def hunyuan_first_frame(size: Size) -> Inputs:
    return {**hunyuan_inputs(size), "guiding_frame_index": torch.zeros(1)}


def hunyuan_reference(size: Size) -> Inputs:
    return {**hunyuan_inputs(size), "ref_latent": noise(1, 16, 1, *size[1:], seed=5)}


def hunyuan_control(size: Size) -> Inputs:
    control = {"input": residuals(size, 2, 48, frames=size[0]), "output": residuals(size, 2, 48, frames=size[0])}
    return {**hunyuan_inputs(size), "control": control}


HUNYUAN_15 = {
    **HUNYUAN,
    "in_channels": 65,
    "out_channels": 32,
    "vec_in_dim": None,
    "patch_size": [1, 1, 1],
    "guidance_embed": False,
    "byt5": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 20,
    "depth_single_blocks": 0,
}


def hunyuan15_inputs(size: Size) -> Inputs:
    size = (size[0], size[1] // 2, size[2] // 2)
    return {
        "x": noise(1, 65, *size),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "txt_byt5": noise(1, 4, 1472, seed=4),
        "transformer_options": {},
    }


def hunyuan15_image(size: Size) -> Inputs:
    return {**hunyuan15_inputs(size), "clip_fea": noise(1, 5, 20, seed=5)}


HUNYUAN_IMAGE = {
    **HUNYUAN,
    "in_channels": 64,
    "out_channels": 64,
    "vec_in_dim": None,
    "patch_size": [1, 1],
    "axes_dim": [8, 8],
    "byt5": True,
}


def hunyuan_image_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 64, size[1] // 2, size[2] // 2),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "txt_byt5": noise(1, 4, 1472, seed=4),
        "guidance": torch.full((1,), 3.5),
        "transformer_options": {},
    }


# -- LTX

LTX = {
    "in_channels": 16,
    "cross_attention_dim": 48,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "caption_channels": 24,
    "num_layers": 2,
}


def ltx_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "attention_mask": None,
        "transformer_options": {},
    }


def ltx_mask(size: Size) -> Inputs:
    return {**ltx_inputs(size), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}


def ltx_times(size: Size) -> Inputs:
    tokens = size[0] * size[1] * size[2]
    return {**ltx_inputs(size), "timestep": torch.linspace(0.1, 0.9, tokens)[None, :, None]}


def ltx_keyframes(size: Size) -> Inputs:
    """Return a call whose last frame is a key frame, of which the first token is not used."""
    frame = size[1] * size[2]
    mask = torch.ones(1, 1, *size)
    mask[:, :, -1, 0, 0] = -1
    keyframes = noise(1, 3, frame, 2, seed=5).abs()
    return {**ltx_times(size), "keyframe_idxs": keyframes, "denoise_mask": mask}


LTX2 = {
    **LTX,
    "audio_in_channels": 128,
    "audio_cross_attention_dim": 24,
    "audio_attention_head_dim": 8,
    "audio_num_attention_heads": 3,
    "connector_attention_head_dim": 16,
    "connector_num_attention_heads": 3,
    "connector_num_layers": 1,
}


def ltx2_inputs(size: Size) -> Inputs:
    return {
        "x": [noise(1, 16, *size), noise(1, 8, 11, 16, seed=6)],
        "timestep": time_of(),
        "a_timestep": time_of(),
        "context": noise(1, 7, 48, seed=2),
        "attention_mask": None,
        "transformer_options": {},
    }


def ltx2_times(size: Size) -> Inputs:
    return {**ltx2_inputs(size), "timestep": ltx_times(size)["timestep"]}


# -- Lumina 2 and Z-Image

LUMINA = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 1,
    "cap_feat_dim": 24,
    "axes_dims": [4, 6, 6],
    "axes_lens": [300, 512, 512],
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.0,
    "qk_norm": True,
}
ZIMAGE = {
    **LUMINA,
    "dim": 264,
    "n_kv_heads": 3,
    "axes_dims": [24, 32, 32],
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}


def lumina_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size[1:]),
        "timesteps": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "num_tokens": 7,
        "transformer_options": {},
    }


def zimage_references(size: Size) -> Inputs:
    references = {"ref_latents": [noise(1, 16, 6, 8, seed=5)], "ref_contexts": [noise(1, 5, 24, seed=6)]}
    return {**lumina_inputs(size), **references}


# -- Stable Diffusion 3

SD3 = {
    "input_size": None,
    "pos_embed_max_size": 24,
    "patch_size": 2,
    "in_channels": 16,
    "depth": 3,
    "adm_in_channels": 20,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 192}},
    "num_patches": 576,
    "pos_embed_scaling_factor": None,
}


def sd3_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size[1:]),
        "timesteps": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "y": noise(1, 20, seed=3),
        "transformer_options": {},
    }


def sd3_control(size: Size) -> Inputs:
    return {**sd3_inputs(size), "control": {"output": residuals(size, 3, 192)}}


# -- Cosmos

COSMOS = {
    "max_img_h": 48,
    "max_img_w": 48,
    "max_frames": 16,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 48,
    "num_blocks": 2,
    "num_heads": 3,
    "crossattn_emb_channels": 24,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 8,
}


def cosmos_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size),
        "timesteps": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "fps": None,
        "padding_mask": torch.zeros(1, 1, *size[1:]),
        "transformer_options": {},
    }


def anima_inputs(size: Size) -> Inputs:
    return {**cosmos_inputs(size), "context": noise(1, 7, 1024, seed=2)}


def cosmos_times(size: Size) -> Inputs:
    return {**cosmos_inputs(size), "timesteps": torch.linspace(0.1, 0.9, size[0])[None]}


# -- HiDream

HIDREAM = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "caption_channels": [24, 24],
    "text_emb_dim": 20,
    "axes_dims_rope": (4, 6, 6),
    "max_resolution": (64, 64),
    "llama_layers": [0, 1, 1, 1],
}


def hidream_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size[1:]),
        "t": 1000 * time_of(),
        "y": noise(1, 20, seed=3),
        "context": noise(1, 7, 24, seed=2),
        "encoder_hidden_states_llama3": noise(1, 2, 6, 24, seed=4),
        "transformer_options": {},
    }


def hidream_edit(size: Size) -> Inputs:
    return {**hidream_inputs(size), "image_cond": noise(1, 16, *size[1:], seed=5)}


# -- ACE-Step

ACE = {
    "in_channels": 8,
    "num_layers": 2,
    "inner_dim": 48,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "mlp_ratio": 2.0,
    "speaker_embedding_dim": 12,
    "text_embedding_dim": 24,
    "ssl_latent_dims": [16, 16],
    "lyric_encoder_vocab_size": 50,
}


def ace_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 8, 16, 5 * size[2]),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "speaker_embeds": torch.zeros(1, 12),
        "lyric_token_idx": torch.arange(6)[None],
        "lyric_mask": torch.ones(1, 6, dtype=torch.long),
        "lyrics_strength": 1.0,
        "transformer_options": {},
    }


# -- Other Wans

VACE = {**WAN, "model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 24}


def vace_inputs(size: Size) -> Inputs:
    return {**wan_inputs(size), "vace_context": noise(1, 2, 24, *size, seed=5), "vace_strength": [1.0, 0.7]}


def camera_inputs(size: Size) -> Inputs:
    cameras = noise(1, 24, size[0], 8 * size[1], 8 * size[2], seed=5)
    return {**wan_inputs(size, 36), "clip_fea": noise(1, 257, 1280, seed=3), "camera_conditions": cameras}


# -- OmniGen 2, Kandinsky 5, AuraFlow, CogVideoX, Krea 2, ERNIE-Image, Mochi, PixArt

OMNIGEN = {
    "in_channels": 16,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "text_feat_dim": 24,
}


def omnigen_inputs(size: Size) -> Inputs:
    return lumina_inputs(size)


def omnigen_references(size: Size) -> Inputs:
    return {**lumina_inputs(size), "ref_latents": [noise(1, 16, 6, 8, seed=5)]}


def omnigen_mask(size: Size) -> Inputs:
    return {**lumina_inputs(size), "attention_mask": torch.tensor([[True] * 5 + [False] * 2])}


KANDINSKY = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "in_text_dim": 24,
    "in_text_dim2": 20,
    "time_dim": 32,
    "model_dim": 48,
    "ff_dim": 64,
    "visual_embed_dim": 132,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}


def kandinsky_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 33, *size),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "y": noise(1, 20, seed=3),
        "transformer_options": {},
    }


def kandinsky_mask(size: Size) -> Inputs:
    return {**kandinsky_inputs(size), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}


AURA = {"dim": 256, "n_layers": 3, "n_double_layers": 1, "n_heads": 2, "cond_seq_dim": 24, "max_seq": 1024}


def aura_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 4, *size[1:]),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


COGVIDEO = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "time_embed_dim": 24,
    "text_embed_dim": 24,
    "num_layers": 2,
    "sample_width": 16,
    "sample_height": 16,
    "sample_frames": 9,
    "use_rotary_positional_embeddings": True,
}


def cogvideo_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


KREA = {
    "features": 96,
    "tdim": 32,
    "txtdim": 24,
    "heads": 3,
    "kvheads": 1,
    "layers": 2,
    "txtlayers": 2,
    "txtheads": 2,
    "txtkvheads": 2,
}


def krea_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, *size[1:]),
        "timesteps": time_of(),
        "context": noise(1, 7, 48, seed=2),
        "transformer_options": {},
    }


def krea_references(size: Size) -> Inputs:
    return {**krea_inputs(size), "ref_latents": [noise(1, 16, 6, 8, seed=5)], "ref_latents_method": "index"}


def krea_references_at_zero(size: Size) -> Inputs:
    return {**krea_references(size), "ref_latents_method": "index_timestep_zero"}


ERNIE = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "in_channels": 32,
    "out_channels": 32,
    "text_in_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}


def ernie_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 32, size[1] // 2, size[2] // 2),
        "timesteps": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


MOCHI = {
    "patch_size": 2,
    "in_channels": 12,
    "hidden_size_x": 48,
    "hidden_size_y": 24,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio_x": 256.0,  # the blocks assert the width of the MLP
    "mlp_ratio_y": 256.0,
    "use_t5": True,
    "t5_feat_dim": 32,
    "t5_token_length": 7,
    "learn_sigma": False,
    "use_extended_posenc": False,
    "rope_theta": 10000.0,
    "qk_norm": True,
    "qkv_bias": False,
    "out_bias": True,
}


def mochi_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 12, *size),
        "timestep": time_of(),
        "context": noise(1, 7, 32, seed=2),
        "attention_mask": torch.ones(1, 7, dtype=torch.bool),
        "num_tokens": 7,
        "transformer_options": {},
    }


def mochi_padding(size: Size) -> Inputs:
    """Return a call with five text tokens and two of padding."""
    mask = torch.tensor([[True] * 5 + [False] * 2])
    return {**mochi_inputs(size), "attention_mask": mask, "num_tokens": 5}


PIXART = {"hidden_size": 48, "depth": 2, "num_heads": 3, "caption_channels": 24, "model_max_length": 7}


def pixart_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 4, *size[1:]),
        "timesteps": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


HUNYUAN_DIT = {
    "hidden_size": 48,
    "depth": 4,
    "num_heads": 3,
    "text_states_dim": 24,
    "text_states_dim_t5": 32,
    "text_len": 7,
    "text_len_t5": 5,
}


def hunyuan_dit_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 4, *size[1:]),
        "t": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "text_embedding_mask": torch.ones(1, 7),
        "encoder_hidden_states_t5": noise(1, 5, 32, seed=3),
        "text_embedding_mask_t5": torch.ones(1, 5),
        "transformer_options": {},
    }


ANIMATE = {**WAN, "dim": 512, "model_type": "animate", "in_dim": 36, "num_layers": 5}


def animate_inputs(size: Size) -> Inputs:
    poses = noise(1, 16, size[0] - 1, *size[1:], seed=5) if size[0] > 1 else None
    return {**wan_inputs(size, 36), "clip_fea": noise(1, 257, 1280, seed=3), "pose_latents": poses}


def animate_faces(size: Size) -> Inputs:
    return {**animate_inputs(size), "face_pixel_values": noise(1, 3, 4 * size[0] - 3, 8, 8, seed=6)}


def motions(faces: Tensor) -> Tensor:
    """Return a vector for each image of a face."""
    return faces.mean((1, 2, 3))[:, None] + noise(1, 512, seed=7)


HUMO = {**WAN, "model_type": "humo"}


def humo_inputs(size: Size) -> Inputs:
    return {**wan_inputs(size), "reference_latent": noise(1, 16, 1, *size[1:], seed=5)}


def humo_audio(size: Size) -> Inputs:
    return {**humo_inputs(size), "audio_embed": noise(1, size[0], 8, 5, 1280, seed=6)}


RADIANCE = {
    **{name: value for name, value in CHROMA.items() if name not in ("in_channels", "out_channels", "patch_size")},
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": 4,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2,
    "nerf_depth": 2,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 16,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
    "use_x0": False,
    "use_sequential_txt_ids": False,
}


def radiance_inputs(size: Size) -> Inputs:
    return {**chroma_inputs(size), "x": noise(1, 3, 2 * size[1], 2 * size[2])}


LENS = {
    "in_channels": 32,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "enc_hidden_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "selected_layer_index": (0, 1),
}


def lens_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 32, size[1] // 2, size[2] // 2),
        "timestep": time_of(),
        "context": noise(1, 7, 48, seed=2),
        "attention_mask": torch.ones(1, 7),
        "transformer_options": {},
    }


def lens_padding(size: Size) -> Inputs:
    return {**lens_inputs(size), "attention_mask": torch.tensor([[1.0, 1, 1, 1, 1, 0, 0]])}


MAGE = {
    "in_channels": 32,
    "out_channels": 32,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}


def mage_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 32, size[1] // 2, size[2] // 2),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


def mage_mask(size: Size) -> Inputs:
    return {**mage_inputs(size), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}


def mage_references(size: Size) -> Inputs:
    return {**mage_inputs(size), "ref_latents": [noise(1, 32, 3, 4, seed=5)]}


BOOGU = {
    "in_channels": 16,
    "hidden_size": 48,
    "num_layers": 2,
    "num_double_stream_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "instruction_feat_dim": 24,
}
JOY = {
    "in_channels": 16,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "text_dim": 24,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}


def joy_inputs(size: Size) -> Inputs:
    return {
        "hidden_states": noise(1, 16, 1, *size[1:]),
        "timestep": 1000 * time_of(),
        "context": noise(1, 7, 24, seed=2),
        "transformer_options": {},
    }


def joy_references(size: Size) -> Inputs:
    return {**joy_inputs(size), "ref_latents": [noise(1, 16, 1, *size[1:], seed=5)]}


HUNYUAN3D = {
    "in_channels": 16,
    "context_in_dim": 24,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 2,
    "guidance_embed": True,
}


def hunyuan3d_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, 5 * size[2] + 1),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "guidance": torch.full((1,), 5.0),
        "transformer_options": {},
    }


STABLE_AUDIO = {
    "io_channels": 16,
    "embed_dim": 192,
    "cond_token_dim": 24,
    "global_cond_dim": 20,
    "project_cond_tokens": True,
    "project_global_cond": True,
    "depth": 2,
    "num_heads": 3,
}


def stable_audio_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, 5 * size[2] + 1),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "global_embed": noise(1, 20, seed=3),
        "transformer_options": {},
    }


ACE15 = {
    "in_channels": 48,
    "hidden_size": 48,
    "text_hidden_dim": 24,
    "timbre_hidden_dim": 16,
    "audio_acoustic_hidden_dim": 16,
    "num_dit_layers": 4,
    "num_lyric_layers": 1,
    "num_timbre_layers": 1,
    "num_tokenizer_layers": 1,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "sliding_window": 16,
    "fsq_dim": 48,
    "encoder_hidden_size": 48,
    "encoder_intermediate_size": 64,
    "encoder_num_heads": 3,
}


def ace15_inputs(size: Size) -> Inputs:
    return {
        "x": noise(1, 16, 10 * size[2]),
        "timestep": time_of(),
        "context": noise(1, 7, 24, seed=2),
        "lyric_embed": noise(1, 6, 24, seed=3),
        "refer_audio": noise(1, 16, 10 * size[2], seed=4),
        "audio_codes": torch.arange(2 * size[2])[None],
        "transformer_options": {},
    }


COSMOS1 = {
    **{key: value for key, value in COSMOS.items() if key not in ("pos_emb_cls",)},
    "pos_emb_cls": "rope3d",
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}


CASES = (
    Case(
        "Wan 2.1 and 2.2, text to video",
        "wan.model.WanModel",
        WAN,
        wan_inputs,
        {
            "one time for each frame (Wan 2.2 5B, image to video)": wan_times_of_frames,
            "time_dim_concat": wan_concatenated,
            "context_latents": wan_contexts,
        },
    ),
    Case(
        "Wan 2.1, image to video",
        "wan.model.WanModel",
        {**WAN, "model_type": "i2v", "in_dim": 36},
        wan_faces,
    ),
    Case(
        "Wan 2.1, first and last frame",
        "wan.model.WanModel",
        {**WAN, "model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 514},
        wan_last_frame,
    ),
    Case("Wan Fun, reference image", "wan.model.WanModel", {**WAN, "in_dim_ref_conv": 16}, wan_reference, sizes=EVEN),
    Case(
        "FLUX.1",
        "flux.model.Flux",
        FLUX,
        flux_inputs,
        {
            "ControlNet": flux_control,
            "reference images (Kontext)": flux_references,
            "reference images and ControlNet": flux_controlled_references,
            "reference images with time 0": flux_references_at_zero,
        },
    ),
    Case("FLUX.2", "flux.model.Flux", FLUX2, flux2_inputs, {"reference images": flux2_references}),
    Case("Chroma", "chroma.model.Chroma", CHROMA, chroma_inputs, {"ControlNet": chroma_control}),
    Case(
        "Qwen-Image",
        "qwen_image.model.QwenImageTransformer2DModel",
        QWEN,
        qwen_inputs,
        {
            "attention mask": qwen_mask,
            "reference images (Edit)": qwen_references,
            "reference images with time 0 (Edit 2511)": qwen_references_at_zero,
            "ControlNet": qwen_control,
        },
    ),
    Case(
        "HunyuanVideo",
        "hunyuan_video.model.HunyuanVideo",
        HUNYUAN,
        hunyuan_inputs,
        {
            "attention mask": hunyuan_mask,
            "first frame (image to video, token replace)": hunyuan_first_frame,
            "reference latent": hunyuan_reference,
            "residuals": hunyuan_control,
        },
        sizes=EVEN,
    ),
    Case(
        "HunyuanVideo 1.5",
        "hunyuan_video.model.HunyuanVideo",
        HUNYUAN_15,
        hunyuan15_inputs,
        {"image to video": hunyuan15_image},
    ),
    Case("HunyuanImage 2.1", "hunyuan_video.model.HunyuanVideo", HUNYUAN_IMAGE, hunyuan_image_inputs),
    Case(
        "LTX-Video",
        "lightricks.model.LTXVModel",
        LTX,
        ltx_inputs,
        {
            "attention mask": ltx_mask,
            "one time for each token (image to video)": ltx_times,
            "key frames": ltx_keyframes,
        },
    ),
    Case(
        "LTX-2",
        "lightricks.av_model.LTXAVModel",
        LTX2,
        ltx2_inputs,
        {"one time for each token (image to video)": ltx2_times},
    ),
    Case("Lumina 2", "lumina.model.NextDiT", LUMINA, lumina_inputs),
    Case(
        "Z-Image",
        "lumina.model.NextDiT",
        ZIMAGE,
        lumina_inputs,
        {"reference images (Omni)": zimage_references},
        shown=((1, 10, 14), (1, 20, 26)),
    ),
    Case(
        "Stable Diffusion 3",
        "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        SD3,
        sd3_inputs,
        {"ControlNet": sd3_control},
    ),
    Case(
        "Cosmos Predict 2",
        "cosmos.predict2.MiniTrainDIT",
        COSMOS,
        cosmos_inputs,
        {"one time for each frame (image to video)": cosmos_times},
        shown=((5, 8, 8), (7, 8, 8)),
    ),
    Case(
        "Anima",
        "anima.model.Anima",
        {**COSMOS, "crossattn_emb_channels": 1024},
        anima_inputs,
        shown=((5, 8, 8), (7, 8, 8)),
    ),
    Case(
        "HiDream-I1",
        "hidream.model.HiDreamImageTransformer2DModel",
        HIDREAM,
        hidream_inputs,
        {"image_cond (E1)": hidream_edit},
    ),
    Case("Wan VACE", "wan.model.VaceWanModel", VACE, vace_inputs, sizes=EVEN),
    Case("Wan Fun Camera", "wan.model.CameraWanModel", {**WAN, "in_dim": 36}, camera_inputs, sizes=EVEN),
    Case(
        "OmniGen 2",
        "omnigen.omnigen2.OmniGen2Transformer2DModel",
        OMNIGEN,
        omnigen_inputs,
        {"attention mask": omnigen_mask, "reference images": omnigen_references},
    ),
    Case("Kandinsky 5", "kandinsky5.model.Kandinsky5", KANDINSKY, kandinsky_inputs, {"attention mask": kandinsky_mask}),
    Case("AuraFlow", "aura.mmdit.MMDiT", AURA, aura_inputs),
    Case("CogVideoX", "cogvideo.model.CogVideoXTransformer3DModel", COGVIDEO, cogvideo_inputs),
    Case(
        "Krea 2",
        "krea2.model.SingleStreamDiT",
        KREA,
        krea_inputs,
        {"reference images": krea_references, "reference images with time 0": krea_references_at_zero},
    ),
    Case("ERNIE-Image", "ernie.model.ErnieImageModel", ERNIE, ernie_inputs),
    Case(
        "Mochi",
        "genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
        MOCHI,
        mochi_inputs,
        {"padding": mochi_padding},
        sizes=EVEN,
    ),
    Case(
        "PixArt",
        "pixart.pixartms.PixArtMS",
        PIXART,
        pixart_inputs,
        shown=((1, 32, 40), (1, 32, 44)),
        sizes=((1, 32, 36), (1, 40, 42)),
    ),
    Case("Hunyuan-DiT", "hydit.models.HunYuanDiT", HUNYUAN_DIT, hunyuan_dit_inputs),
    Case(
        "Wan 2.2 Animate",
        "wan.model_animate.AnimateWanModel",
        ANIMATE,
        animate_inputs,
        {"faces": animate_faces},
        sizes=((3, 6, 10), (2, 6, 8)),
        stubs={"motion_encoder.get_motion": motions},
    ),
    Case("HuMo", "wan.model.HumoWanModel", HUMO, humo_inputs, {"audio": humo_audio}, sizes=EVEN),
    Case("Chroma Radiance", "chroma_radiance.model.ChromaRadiance", RADIANCE, radiance_inputs),
    Case("Lens", "lens.model.LensTransformer2DModel", LENS, lens_inputs, {"padding": lens_padding}),
    Case(
        "Mage-Flow",
        "mage_flow.model.MageFlowTransformer2DModel",
        MAGE,
        mage_inputs,
        {"attention mask": mage_mask, "reference images": mage_references},
    ),
    Case(
        "Boogu",
        "boogu.model.BooguTransformer2DModel",
        BOOGU,
        lumina_inputs,
        {"attention mask": omnigen_mask, "reference images": omnigen_references},
    ),
    Case(
        "JoyImage",
        "joyimage.model.JoyImageTransformer3DModel",
        JOY,
        joy_inputs,
        {"reference images": joy_references},
        sizes=EVEN,
    ),
    Case("Hunyuan3D 2", "hunyuan3d.model.Hunyuan3Dv2", HUNYUAN3D, hunyuan3d_inputs),
    Case("Cosmos 1", "cosmos.model.GeneralDIT", COSMOS1, cosmos_inputs, shown=((5, 8, 8), (7, 8, 8))),
    Case("Stable Audio", "audio.dit.AudioDiffusionTransformer", STABLE_AUDIO, stable_audio_inputs),
    Case("ACE-Step 1.5", "ace.ace_step15.AceStepConditionGenerationModel", ACE15, ace15_inputs),
    Case("ACE-Step 1", "ace.model.ACEStepTransformer2DModel", ACE, ace_inputs),
)
