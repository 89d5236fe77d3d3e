"""Text encoders in their published sizes, created without weights and without any download."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def _make(model: str, config: str, **options: Any) -> nn.Module:
    """Return an instance of transformers' class ``model``, whose ``config`` class gets ``options``."""
    import transformers

    encoder: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return encoder


_t5_xxl = partial(_make, d_model=4096, d_ff=10240, num_layers=24, num_heads=64, d_kv=64, feed_forward_proj="gated-gelu")
# The encoder of T5 v1.1 XXL, for example in FLUX.1.
T5: Callable[[], nn.Module] = partial(_t5_xxl, "T5EncoderModel", "T5Config", vocab_size=32128)
UMT5: Callable[[], nn.Module] = partial(_t5_xxl, "UMT5EncoderModel", "UMT5Config", vocab_size=256384)
# Llama 3 8B without its language-model head, as in llava-llama-3-8b of HunyuanVideo.
LLAMA: Callable[[], nn.Module] = partial(
    _make,
    "LlamaModel",
    "LlamaConfig",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128320,
)
# The language model of Mistral Small 3, the text encoder of FLUX.2.
MISTRAL: Callable[[], nn.Module] = partial(
    _make,
    "MistralForCausalLM",
    "MistralConfig",
    hidden_size=5120,
    intermediate_size=32768,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
)
# Qwen2.5-VL 7B, the text encoder of Qwen-Image.
QWEN: Callable[[], nn.Module] = partial(
    _make,
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLConfig",
    text_config={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    vision_config={
        "hidden_size": 1280,
        "depth": 32,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
)
