"""Parts of tiny pipelines: tokenizers, encoders of text and images, VAEs, schedulers, and options of a short call."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from zoo.flux import scenes as grammar
from zoo.flux.models import SHIFT, FluxDenoiser, Tokenizers, build_tokenizers
from zoo.tiny.base import fill
from zoo.tiny.transformers.registry import MODELS

TEXT_WIDTH, IMAGE_WIDTH = 24, 20
IMAGE_TOKENS = 5  # of 8 × 8 pixels each, and one for all
PROMPT = "a large red circle at the top left, on white"

LATENT_CHANNELS = 4


class TinyPipeline:
    """A function that builds a pipeline, and options of a short call.

    Args:
        tables, options: Arguments of the call in addition to those that most pipelines take; later ones win.
        without: Arguments that most pipelines take and this one does not.
    """

    def __init__(
        self, build: Callable[[], Any], *tables: dict[str, Any], without: tuple[str, ...] = (), **options: Any
    ) -> None:
        self.build, self.without = build, without
        self.options = {name: value for table in (*tables, options) for name, value in table.items()}

    def call(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of a short call that gives latents: an odd number of few tokens, three steps, a seed."""
        defaults = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "latent", **self.options}
        arguments = {**defaults, "generator": torch.Generator().manual_seed(7), **options}
        return {name: value for name, value in arguments.items() if name not in self.without}


# -- tokenizers and encoders


@cache
def tokenizers() -> Tokenizers:
    return build_tokenizers()


@cache
def _filled_flux_encoders() -> dict[str, nn.Module]:
    denoiser = FluxDenoiser(tokenizers())
    return {"clip": fill(denoiser.text_encoder, seed=3), "t5": fill(denoiser.text_encoder_2, seed=4)}


def flux_encoders() -> dict[str, nn.Module]:
    """Return new copies of a tiny CLIP and a tiny T5: hooks that a caller installs on them stay with its pipeline."""
    return copy.deepcopy(_filled_flux_encoders())


_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{{ message['content'][0]['text'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which words of the grammar, punctuation, line ends, and the marks of chat templates are one
    token each.

    Cut this way, the templates of the pipelines have about as many tokens as the pipelines cut off: the prompt is left.
    Each pipeline has its own: LTX-2 turns its padding to the left.
    """
    marks = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    marks += [f"<|{name}|>" for name in ("start_header_id", "end_header_id", "eot_id", "im_start", "im_end")]
    vocab = {word: index for index, word in enumerate([*marks, *dict.fromkeys(grammar.words())])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.add_special_tokens(marks)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_CHAT,
        padding_side="right",
        model_max_length=512,
    )


ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
# A decoder that encodes text. Pipelines take its third hidden state from the end, which is that after one layer.
DECODER = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 2 * TEXT_WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": IMAGE_WIDTH,
    "intermediate_size": 2 * IMAGE_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}


def from_transformers(cls: str, config: str, seed: int = 5, **fields: Any) -> nn.Module:
    """Build a model of transformers with random parameters."""
    return fill(getattr(transformers, cls)(getattr(transformers, config)(**fields)), seed)


def decoder(cls: str, config: str, **fields: Any) -> dict[str, Any]:
    """Return a tiny decoder and its tokenizer, as components of a pipeline."""
    tokenizer = word_tokenizer()
    text_encoder = from_transformers(cls, config, vocab_size=len(tokenizer), **{**DECODER, **fields})
    return {"text_encoder": text_encoder, "tokenizer": tokenizer}


def qwen_vl(tokenizer: PreTrainedTokenizerFast, width: int = IMAGE_WIDTH, **fields: Any) -> nn.Module:
    """Return a tiny Qwen2.5-VL. Its images have ``width`` channels."""
    text = {key: fields.pop(key) for key in ("bos_token_id", "eos_token_id") if key in fields}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": width, "intermediate_size": width}
    return from_transformers(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text_config={"vocab_size": len(tokenizer), "rope_parameters": ROPE, **DECODER, **text},
        vision_config={**vision, "out_hidden_size": TEXT_WIDTH},
        **fields,
    )


def llava() -> nn.Module:
    """Return a tiny LLaVA, which sees images of 4 tokens."""
    tokenizer = word_tokenizer()
    return from_transformers(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), **DECODER),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=16),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        vision_feature_layer=-1,
    )


def clip_vision() -> nn.Module:
    return from_transformers("CLIPVisionModel", "CLIPVisionConfig", 7, **VISION, image_size=16)


def clip_images() -> Any:
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)


def siglip() -> dict[str, Any]:
    encoder = from_transformers("SiglipVisionModel", "SiglipVisionConfig", 7, **VISION, image_size=16)
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return {"image_encoder": encoder, "feature_extractor": processor}


def llama_and_clip() -> dict[str, Any]:
    clip = {"text_encoder_2": flux_encoders()["clip"], "tokenizer_2": tokenizers().clip}
    return {**decoder("LlamaModel", "LlamaConfig"), **clip}


def clip_and_t5() -> dict[str, Any]:
    encoders = flux_encoders()
    return {
        "text_encoder": encoders["clip"],
        "tokenizer": tokenizers().clip,
        "text_encoder_2": encoders["t5"],
        "tokenizer_2": tokenizers().t5,
    }


def t5() -> dict[str, Any]:
    return {"text_encoder": flux_encoders()["t5"], "tokenizer": tokenizers().t5}


def umt5() -> dict[str, Any]:
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    encoder = from_transformers("UMT5EncoderModel", "UMT5Config", 6, vocab_size=len(tokenizers().t5), **sizes)
    return {"text_encoder": encoder, "tokenizer": tokenizers().t5}


# -- VAEs


def random_model(cls: str, seed: int, **config: Any) -> nn.Module:
    return fill(getattr(diffusers, cls)(**config), seed)


def image_vae() -> nn.Module:
    """Return a VAE whose latent pixels are 8 × 8 pixels."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = kl_vae("AutoencoderKL", **blocks)
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


def small_vae(latent_channels: int = LATENT_CHANNELS) -> nn.Module:
    """Return a VAE whose latent pixels are 4 × 4 pixels: 64 × 64 pixels give enough tokens for four ranks."""
    vae = random_model(
        "AutoencoderKL",
        2,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=128,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    return vae


def kl_vae(cls: str, **config: Any) -> nn.Module:
    """Return a VAE of one of the classes whose configs are similar to those of AutoencoderKL."""
    sizes = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    return random_model(cls, 2, **{**sizes, **config})


def wan_vae(cls: str = "AutoencoderKLWan", latent_channels: int = 4, **config: Any) -> nn.Module:
    """Return a VAE of one of the classes whose configs are similar to those of AutoencoderKLWan."""
    config |= {
        "latents_mean": [0.1, -0.2, 0.3, 0.0] * (latent_channels // 4),
        "latents_std": [1.2, 0.9] * (latent_channels // 2),
    }
    return random_model(cls, 2, base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, z_dim=latent_channels, **config)


# -- all families

_TEXT_PARTS = [f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3", "_4")] + ["processor"]


def whole_pipe(cls: str, **components: Any) -> Any:
    components.setdefault("scheduler", FlowMatchEulerDiscreteScheduler(shift=SHIFT))
    pipe = getattr(diffusers, cls)(**components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_pipe(cls: str, model: str, *, config: dict[str, Any] | None = None, **components: Any) -> Any:
    """Build a pipeline around a tiny transformer. Text encoders that are not given are None.

    Args:
        model: Name in :data:`zoo.tiny.transformers.registry.MODELS`.
        config: Changes to the config of the model.
        components: Components of the pipeline; the VAE defaults to :func:`image_vae`.
    """
    taken = inspect.signature(getattr(diffusers, cls)).parameters
    components = dict.fromkeys(name for name in _TEXT_PARTS if name in taken) | components
    if "vae" not in components:
        components["vae"] = image_vae()
    return whole_pipe(cls, transformer=MODELS[model].build(**config or {}), **components)


# -- options of a call


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def random_mask(height: int, width: int) -> Image.Image:
    return random_image(height, width, seed=1).convert("L")


def random_video(frames: int, height: int, width: int) -> list[Image.Image]:
    return [random_image(height, width, seed) for seed in range(frames)]


def embeddings(tokens: int, width: int) -> dict[str, Any]:
    """Return embeddings of a prompt and a negative prompt, in place of both.

    Some pipelines clean a prompt with ftfy and fail without it (Wan's from images and videos, ChronoEdit, Helios).
    """
    generator = torch.Generator().manual_seed(tokens)
    arguments: dict[str, Any] = {"prompt": None}
    for kind in ("prompt", "negative_prompt"):
        arguments[f"{kind}_embeds"] = torch.randn(1, tokens, width, generator=generator)
    return arguments


# 3 × 5 image tokens: of 16 × 16 pixels, or of 8 × 8.
SIZE = {"height": 48, "width": 80}
SMALL = {"height": 24, "width": 40}
VIDEO = {**SIZE, "num_frames": 9}
IMAGE, SMALL_IMAGE = random_image(48, 80), random_image(24, 40)
MASK, SMALL_MASK = random_mask(48, 80), random_mask(24, 40)
FRAMES = random_video(9, 48, 80)
TEXT = embeddings(9, TEXT_WIDTH)


def pooled() -> dict[str, Tensor]:
    """Return pooled embeddings of a prompt and of a negative one."""
    of = embeddings(1, IMAGE_WIDTH)
    return {
        "pooled_prompt_embeds": of["prompt_embeds"][:, 0],
        "negative_pooled_prompt_embeds": of["negative_prompt_embeds"][:, 0],
    }


def first(length: int, total: int = 9) -> Tensor:
    """Return a mask ``[1, total]`` of a text of ``length`` tokens."""
    return (torch.arange(total) < length)[None]


def masks(
    name: str, dtype: torch.dtype = torch.bool, lengths: tuple[int, int] = (9, 5), total: int = 9
) -> dict[str, Tensor]:
    """Return masks of the prompt, of which by default all tokens are valid, and of the negative prompt."""
    kinds = zip(("prompt", "negative_prompt"), lengths, strict=True)
    return {f"{kind}_{name}": first(length, total).to(dtype) for kind, length in kinds}
