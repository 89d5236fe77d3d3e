"""What fits where, on paper: weights of published models by method and number of ranks, and what each method sends per step.

    python -m benchmarks.planner.weights

Parameters are counted on the models of diffusers and transformers themselves, at the published sizes, on the meta device. Fills its parts of
docs/weights.md, and writes benchmarks/results/weights_memory.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from benchmarks.environment import write_results
from benchmarks.page_parts import fill
from para_core.adapters.planner import encoders
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.components import blocks_of
from para_core.plans.module_matching import matching_modules

PAGE = Path(__file__).parents[2] / "docs/weights.md"
BYTES = 2  # of a weight or an activation in bfloat16
RANKS = (2, 4, 8)
CARDS = (24, 48, 80)
# Of a card, what is left for activations, the autoencoder, CUDA and NCCL themselves.
RESERVED = 6
# Gigabytes per second that a rank receives in a collective: of 32, 64 and 450 GB/s, what NCCL reaches.
LINKS = {"PCIe 4": 22.0, "PCIe 5": 45.0, "NVLink 4": 350.0}
# Outside of the blocks, smaller weights are not sharded by FSDP2 (para_core/weights/fsdp.py).
LARGE = 2**20


@dataclass(frozen=True)
class Published:
    """Args:
    transformers: how many the pipeline has.
    tokens: of one call, text and image.
    calls: of a transformer per step.
    """

    cls: str
    encoder: Callable[[], nn.Module]
    tokens: int
    transformers: int = 1
    calls: int = 1
    config: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "FLUX.2 [dev], 1024 × 1024": Published("Flux2Transformer2DModel", encoders.mistral, 64 * 64 + 512),
    "HunyuanVideo, 1280 × 720 × 129": Published("HunyuanVideoTransformer3DModel", encoders.llama, 33 * 45 * 80 + 256),
    "Wan 2.2 A14B, 1280 × 720 × 81": Published(
        "WanTransformer3DModel", encoders.umt5, 21 * 45 * 80, transformers=2, calls=2
    ),
    "Qwen-Image, 1328 × 1328": Published("QwenImageTransformer2DModel", encoders.qwen, 83 * 83 + 128, calls=2),
}


@dataclass(frozen=True)
class Sizes:
    """Parameters of one module: all, those that FSDP2 shards, those of its two largest neighbours and of its root, which are gathered
    while they run, and those that tensor ranks share."""

    total: int
    sharded: int
    at_once: int
    tensor: int
    reduced: int  # all-reduced activations per token of one call

    def fsdp(self, ranks: int) -> float:
        """Held at most, while it runs."""
        return self.total - self.sharded + self.sharded / ranks + self.at_once

    def at_rest(self, ranks: int) -> float:
        return self.total - self.sharded + self.sharded / ranks

    def tensor_parallel(self, ranks: int) -> float:
        return self.total - self.tensor + self.tensor / ranks


def count(parameters: Any) -> int:
    return sum(x.numel() for x in {id(x): x for x in parameters}.values())


def sizes_of(module: nn.Module) -> Sizes:
    blocks = blocks_of(module)
    of_blocks = [count(block.parameters()) for block in blocks]
    inside = {id(x) for block in blocks for x in block.parameters()}
    root = count(x for x in module.parameters() if id(x) not in inside and x.numel() >= LARGE)
    neighbours = max(map(sum, pairwise(of_blocks)))
    plan, tensor, reduced = tensor_plan_for(module), 0, 0
    for name, style in plan.linears.items() if plan is not None else ():
        for linear in matching_modules(module, name).values():
            tensor += linear.weight.numel()
            # What is summed over the ranks; of the text stream there are few tokens.
            if style.along == "rowwise" and not any(part in name for part in ("context", "add_out", "txt", "refiner")):
                reduced += linear.weight.shape[0]
    return Sizes(count(module.parameters()), sum(of_blocks) + root, root + neighbours, tensor, reduced)


def row(model: Published) -> dict[str, Any]:
    """Gigabytes of weights on a rank by method and ranks, and gigabytes received per step."""
    with torch.device("meta"):
        transformer = sizes_of(getattr(diffusers, model.cls)(**model.config))
        encoder = sizes_of(model.encoder())
    giga = BYTES / 1e9
    one_copy = giga * (transformer.total * model.transformers + encoder.total)
    held: dict[str, dict[int, float]] = {"fsdp": {}, "tensor": {}}
    sent: dict[str, dict[int, float]] = {"fsdp": {}, "tensor": {}}
    for ranks in RANKS:
        resting = transformer.at_rest(ranks) * (model.transformers - 1)
        # Either denoises or encodes; the other rests.
        held["fsdp"][ranks] = giga * max(
            resting + transformer.fsdp(ranks) + encoder.at_rest(ranks),
            resting + transformer.at_rest(ranks) + encoder.fsdp(ranks),
        )
        # Text encoders by FSDP2 over the same ranks.
        held["tensor"][ranks] = giga * (transformer.tensor_parallel(ranks) * model.transformers + encoder.fsdp(ranks))
        share = (ranks - 1) / ranks
        sent["fsdp"][ranks] = giga * model.calls * share * transformer.sharded
        sent["tensor"][ranks] = giga * model.calls * 2 * share * transformer.reduced * model.tokens
    return {
        "one copy": one_copy,
        "transformer, billions": transformer.total / 1e9,
        "text encoder, billions": encoder.total / 1e9,
        "held": held,
        "received per step": sent,
    }


def fits(held: float) -> str:
    return next((f"{card} GB" for card in CARDS if held + RESERVED <= card), "none")


def held_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| model | one copy | method | " + " | ".join(f"{n} ranks" for n in RANKS) + " |"]
    lines.append("| --- | ---: | --- |" + " ---: |" * len(RANKS))
    for name, found in rows.items():
        copy = found["one copy"]
        lines.append(f"| {name} | {copy:.0f} | replicate |" + f" {copy:.0f} ({fits(copy)}) |" * len(RANKS))
        for method, held in found["held"].items():
            cells = [f"{held[n]:.0f} ({fits(held[n])})" for n in RANKS]
            lines.append(f"| | | {method} | " + " | ".join(cells) + " |")
    return lines


def sent_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """On 2 / 4 / 8 ranks."""
    lines = ["| model | method | GB | " + " | ".join(f"{link}, s" for link in LINKS) + " |"]
    lines.append("| --- | --- | ---: |" + " ---: |" * len(LINKS))
    for name, found in rows.items():
        for method, sent in found["received per step"].items():
            received = " / ".join(f"{sent[n]:.0f}" for n in RANKS)
            seconds = [" / ".join(f"{sent[n] / speed:.2f}" for n in RANKS) for speed in LINKS.values()]
            lines.append(f"| {name} | {method} | {received} | " + " | ".join(seconds) + " |")
    return lines


def main() -> None:
    """Count, and write the parts of the page."""
    rows = {name: row(model) for name, model in MODELS.items()}
    parts = {"held": held_table(rows), "sent": sent_table(rows)}
    PAGE.write_text(fill(PAGE.read_text(), parts))
    write_results("weights_memory", {"gigabytes": rows}, "diffusers", "transformers")
    print("\n".join([*parts["held"], "", *parts["sent"]]))


if __name__ == "__main__":
    main()
