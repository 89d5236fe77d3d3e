"""What tiny pipelines are made of: tokenizers, encoders of text and images, random components, images and videos of
noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from zoo.flux import grammar
from zoo.flux.models import SHIFT, Denoiser, Tokenizers, build_tokenizers
from zoo.tiny.random_weights import fill

TEXT_WIDTH, IMAGE_WIDTH = 24, 20
IMAGE_TOKENS = 5  # of 8 × 8 pixels each, and one for all
PROMPT = "a large red circle at the top left, on white"

LATENT_CHANNELS = 4


def build_vae(latent_channels: int = LATENT_CHANNELS) -> AutoencoderKL:
    """Two downsamplings: an image of 64 × 64 pixels is 16 × 16 latent pixels, tokens enough for four ranks."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=128,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


@dataclass(frozen=True)
class TinyPipeline:
    """How to build a pipeline, and what a short call of it is given in addition to a prompt.

    Args:
        without: what this pipeline does not take.
    """

    build: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def call(self, **options: Any) -> dict[str, Any]:
        """Arguments of a short call that gives latents: few tokens, an odd number of them, three steps, a seed."""
        defaults = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "latent", **self.options}
        given = {**defaults, "generator": torch.Generator().manual_seed(7), **options}
        return {name: value for name, value in given.items() if name not in self.without}


# -- tokenizers and encoders


@cache
def tokenizers() -> Tokenizers:
    return build_tokenizers()


@cache
def _filled_flux_encoders() -> dict[str, nn.Module]:
    denoiser = Denoiser(tokenizers())
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
    """Words of the grammar, punctuation, line ends, and the marks of chat templates are one token each.

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
# Of a decoder that encodes text. Of its hidden states pipelines take the third from the end: after one layer.
DECODER = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 2 * TEXT_WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": IMAGE_WIDTH,
    "intermediate_size": 2 * IMAGE_WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=len(word_tokenizer()), **DECODER)
    return fill(transformers.LlamaModel(config), seed=5)


def llava() -> nn.Module:
    """Sees images of 4 tokens."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=len(word_tokenizer()), **DECODER),
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        image_token_index=word_tokenizer().convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        vision_feature_layer=-1,
    )
    return fill(transformers.LlavaForConditionalGeneration(config), seed=5)


def umt5() -> nn.Module:
    vocab_size = len(tokenizers().t5)
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return fill(transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=vocab_size, **sizes)), seed=6)


def clip_vision() -> nn.Module:
    return fill(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_VISION)), seed=7)


def clip_images() -> Any:
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)


def siglip() -> nn.Module:
    return fill(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_VISION)), seed=7)


def siglip_images() -> Any:
    return transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})


def llama_and_clip() -> dict[str, Any]:
    return {
        "text_encoder": llama(),
        "tokenizer": word_tokenizer(),
        "text_encoder_2": flux_encoders()["clip"],
        "tokenizer_2": tokenizers().clip,
    }


def t5() -> dict[str, Any]:
    return {"text_encoder": flux_encoders()["t5"], "tokenizer": tokenizers().t5}


def umt5_and_tokenizer() -> dict[str, Any]:
    return {"text_encoder": umt5(), "tokenizer": tokenizers().t5}


# -- all families


def random_model(cls: str, seed: int, **config: Any) -> nn.Module:
    return fill(getattr(diffusers, cls)(**config), seed)


def whole_pipe(cls: str, **components: Any) -> Any:
    components.setdefault("scheduler", FlowMatchEulerDiscreteScheduler(shift=SHIFT))
    pipe = getattr(diffusers, cls)(**components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def random_video(frames: int, height: int, width: int) -> list[Image.Image]:
    """Noise."""
    return [random_image(height, width, seed) for seed in range(frames)]


def embeddings(tokens: int, width: int) -> dict[str, Any]:
    """Of a prompt and a negative one, in place of them.

    For pipelines that clean a prompt with ftfy and fail without it (Wan's from images and videos, ChronoEdit, Helios).
    """
    generator = torch.Generator().manual_seed(tokens)
    given: dict[str, Any] = {"prompt": None}
    for kind in ("prompt", "negative_prompt"):
        given[f"{kind}_embeds"] = torch.randn(1, tokens, width, generator=generator)
    return given
