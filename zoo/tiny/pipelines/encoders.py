"""Tokenizers and encoders of text and images, as small as their classes can be."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from zoo.flux import scenes as grammar
from zoo.flux.models import FluxDenoiser, Tokenizers, build_tokenizers
from zoo.tiny.base import IMAGE_WIDTH, TEXT_WIDTH, fill

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{{ message['content'][0]['text'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}


def _sizes(width: int, layers: int) -> dict[str, Any]:
    widths = {"hidden_size": width, "intermediate_size": 2 * width}
    return {**widths, "num_hidden_layers": layers, "num_attention_heads": 2}


# A decoder that encodes text. Pipelines take its third hidden state from the end, which is that after one layer.
DECODER = _sizes(TEXT_WIDTH, 3) | {"num_key_value_heads": 1, "max_position_embeddings": 2048, "pad_token_id": 0}
VISION = _sizes(IMAGE_WIDTH, 2) | {"patch_size": 8}


# -- Encoders of FLUX.


@cache
def tokenizers() -> Tokenizers:
    return build_tokenizers()


@cache
def _flux() -> FluxDenoiser:
    denoiser = FluxDenoiser(tokenizers())
    fill(denoiser.text_encoder, seed=3)
    fill(denoiser.text_encoder_2, seed=4)
    return denoiser


def clip(suffix: str = "") -> dict[str, Any]:
    """Return a new copy of a tiny CLIP, so that hooks of a caller stay with its pipeline."""
    return {f"text_encoder{suffix}": copy.deepcopy(_flux().text_encoder), f"tokenizer{suffix}": tokenizers().clip}


def t5(suffix: str = "") -> dict[str, Any]:
    """Return a new copy of a tiny T5."""
    return {f"text_encoder{suffix}": copy.deepcopy(_flux().text_encoder_2), f"tokenizer{suffix}": tokenizers().t5}


# -- Encoders of transformers.


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which words of the grammar, punctuation, line ends, and the marks of chat templates are one
    token each.

    The templates of the pipelines then have about as many tokens as the pipelines cut off, so that the prompt remains.
    Each pipeline has its own tokenizer, because LTX-2 moves the padding to the left.
    """
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    marks = [*names.values(), "<image>"]
    marks += [f"<|{name}|>" for name in ("start_header_id", "end_header_id", "eot_id", "im_start", "im_end")]
    vocab = {word: index for index, word in enumerate([*marks, *dict.fromkeys(grammar.words())])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.add_special_tokens(marks)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    options = {"chat_template": _CHAT, "padding_side": "right", "model_max_length": 512}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def from_transformers(cls: str, seed: int = 5, **fields: Any) -> nn.Module:
    """Build a model of transformers with random parameters and these fields of its config."""
    model = getattr(transformers, cls)
    return fill(model(model.config_class(**fields)), seed)


def decoder(cls: str, **fields: Any) -> dict[str, Any]:
    """Return a tiny decoder and its tokenizer, as components of a pipeline."""
    tokenizer = word_tokenizer()
    text_encoder = from_transformers(cls, vocab_size=len(tokenizer), **{**DECODER, **fields})
    return {"text_encoder": text_encoder, "tokenizer": tokenizer}


def qwen_vl(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> nn.Module:
    """Return a tiny Qwen2.5-VL."""
    text = {key: fields.pop(key) for key in ("bos_token_id", "eos_token_id") if key in fields}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": IMAGE_WIDTH, "intermediate_size": IMAGE_WIDTH}
    return from_transformers(
        "Qwen2_5_VLForConditionalGeneration",
        text_config={"vocab_size": len(tokenizer), "rope_parameters": ROPE, **DECODER, **text},
        vision_config={**vision, "out_hidden_size": TEXT_WIDTH},
        **fields,
    )


def llava() -> nn.Module:
    """Return a tiny LLaVA, which sees images of 4 tokens."""
    tokenizer = word_tokenizer()
    return from_transformers(
        "LlavaForConditionalGeneration",
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), **DECODER),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=16),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        vision_feature_layer=-1,
    )


def umt5() -> dict[str, Any]:
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    encoder = from_transformers("UMT5EncoderModel", 6, vocab_size=len(tokenizers().t5), **sizes)
    return {"text_encoder": encoder, "tokenizer": tokenizers().t5}


def clip_vision() -> nn.Module:
    return from_transformers("CLIPVisionModel", 7, **VISION, image_size=16)


def clip_images() -> transformers.CLIPImageProcessorPil:
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)


def siglip() -> dict[str, Any]:
    encoder = from_transformers("SiglipVisionModel", 7, **VISION, image_size=16)
    processor = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return {"image_encoder": encoder, "feature_extractor": processor}
