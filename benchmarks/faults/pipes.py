"""The two pipelines that faults strike, with a LoRA, and their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.faults.generate import PIPELINES

SIZES = {
    "flux": {"height": 64, "width": 56, "max_sequence_length": 13},
    "wan": {"height": 48, "width": 80, "num_frames": 9, "max_sequence_length": 13},
}
LORA = "style"


def build(name: str) -> Any:
    pipe = PIPELINES[name].build()
    # Before anything is parallelized, as load_lora_weights would.
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), LORA)
    fill_lora(pipe, seed=1)
    return pipe


def fill_lora(pipe: Any, seed: int) -> None:
    """Other weights for the LoRA, by their seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in _lora_weights(pipe.transformer):
            del name
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def _lora_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in module.named_parameters() if "lora_" in name]


def call_of(name: str, **options: Any) -> dict[str, Any]:
    """A short call that gives pixels."""
    call = PIPELINES[name].call(**SIZES[name])
    return {**call, "num_inference_steps": 2, "output_type": "pt", "return_dict": False, **options}
