"""Text encoders at their published sizes, made from configs without weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn


def t5() -> nn.Module:
    """Make the encoder of T5 v1.1 XXL."""
    import transformers

    return _module(transformers.T5EncoderModel(transformers.T5Config(**_T5, vocab_size=32128)))


def umt5() -> nn.Module:
    """Make the encoder of UMT5-XXL."""
    import transformers

    return _module(transformers.UMT5EncoderModel(transformers.UMT5Config(**_T5, vocab_size=256384)))


_T5: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "d_kv": 64,
    "feed_forward_proj": "gated-gelu",
}


def llama() -> nn.Module:
    """Make Llama 3 8B without its head, as in llava-llama-3-8b."""
    import transformers

    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _module(transformers.LlamaModel(transformers.LlamaConfig(**size, num_key_value_heads=8, vocab_size=128320)))


def mistral() -> nn.Module:
    """Make the language model of Mistral Small 3."""
    import transformers

    size = {"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32}
    config = transformers.MistralConfig(
        **size, num_key_value_heads=8, head_dim=128, vocab_size=131072, tie_word_embeddings=False
    )
    return _module(transformers.MistralForCausalLM(config))


def qwen() -> nn.Module:
    """Make Qwen2.5-VL 7B."""
    import transformers

    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    vision = {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
        vision_config=vision,
    )
    return _module(transformers.Qwen2_5_VLForConditionalGeneration(config))


def _module(module: Any) -> nn.Module:
    # transformers' classes are untyped.
    typed: nn.Module = module
    return typed
