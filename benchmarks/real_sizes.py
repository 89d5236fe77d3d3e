"""What a rank sends per step for models of real size, by the formula that the tiny pipelines confirm:

    python -m benchmarks.real_sizes

The models of diffusers themselves, with the sizes that were published, run once without data (`benchmarks.expected_traffic`). Needs
benchmarks/results/pipelines.json (python -m benchmarks.pipelines): where the formula gave other bytes than were counted there, it ends
in an error. Writes docs/traffic.md and benchmarks/results/real_sizes.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks.environment import RESULTS, write_results
from benchmarks.expected_traffic import observed
from benchmarks.pipelines import MESHES, check, largest_per_step
from para_core.adapters.supported import plan_for
from para_core.planner.traffic import ModelCall, Shape, sent_in_rounds

PAGE = Path(__file__).parents[1] / "docs/traffic.md"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Model:
    """A model as it was published, in bfloat16.

    Args:
        inputs: of one call.
        branches: calls of a step, which two halves of the ranks could share.
        config: what is not diffusers' default.
    """

    cls: str
    inputs: Callable[[], dict[str, Any]]
    branches: int = 1
    config: dict[str, Any] = field(default_factory=dict)


def flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": empty(1, 64 * 64, 64),
        "encoder_hidden_states": empty(1, 512, 4096),
        "pooled_projections": empty(1, 768),
        "timestep": empty(1),
        "guidance": empty(1),
        "img_ids": empty(64 * 64, 3),
        "txt_ids": empty(512, 3),
    }


def hunyuan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": empty(1, 16, 33, 90, 160),
        "timestep": empty(1),
        "encoder_hidden_states": empty(1, 256, 4096),
        "encoder_attention_mask": empty(1, 256, dtype=torch.int64),
        "pooled_projections": empty(1, 768),
        "guidance": empty(1),
    }


def cogvideox_inputs() -> dict[str, Any]:
    angles = empty(13 * 30 * 45, 64)
    return {
        "hidden_states": empty(2, 13, 16, 60, 90),
        "encoder_hidden_states": empty(2, 226, 4096),
        "timestep": empty(2),
        "image_rotary_emb": (angles, angles),
    }


def mochi_inputs() -> dict[str, Any]:
    return {
        "hidden_states": empty(2, 12, 14, 60, 106),
        "encoder_hidden_states": empty(2, 256, 4096),
        "timestep": empty(2),
        "encoder_attention_mask": empty(2, 256, dtype=torch.bool),
    }


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": empty(1, 16, 21, 90, 160),
        "timestep": empty(1),
        "encoder_hidden_states": empty(1, 512, 4096),
    }


REAL = {
    "FLUX.1-dev, 1024 × 1024": Model("FluxTransformer2DModel", flux_inputs, config={"guidance_embeds": True}),
    "HunyuanVideo, 1280 × 720 × 129": Model("HunyuanVideoTransformer3DModel", hunyuan_inputs),
    "CogVideoX-5B, 720 × 480 × 49": Model(
        "CogVideoXTransformer3DModel",
        cogvideox_inputs,
        config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "Mochi 1, 848 × 480 × 84": Model("MochiTransformer3DModel", mochi_inputs),
    "Wan 2.1 14B, 1280 × 720 × 81": Model("WanTransformer3DModel", wan_inputs, branches=2),
}


def all_valid(mask: Tensor, *, as_tuple: bool = False) -> Tensor:
    """``torch.nonzero`` of a mask without data: Mochi attends to valid text only. All of it is the most that it sends."""
    return torch.arange(mask.numel())[:, None]


def call_of(model: Model, batch: int) -> ModelCall:
    """What one call does; ``batch``: shares of its samples, if it has several."""
    dtype = torch.get_default_dtype()
    with FakeTensorMode(), torch.no_grad(), mock.patch("torch.nonzero", all_valid):
        torch.set_default_dtype(torch.bfloat16)
        try:
            transformer = getattr(diffusers, model.cls)(**model.config).eval()
        finally:
            torch.set_default_dtype(dtype)
        with observed(transformer, batch) as calls:
            transformer(**model.inputs(), return_dict=False)
    assert plan_for(transformer) is not None
    return calls[0]


def gigabytes(calls: dict[int, ModelCall], branches: int, shape: Shape) -> float | None:
    """That the rank which sends most sends in a step; None where the ranks along ``batch`` would have nothing to share.

    Args:
        calls: by the number of shares of their samples.
    """
    batch, ring, ulysses = shape
    call = calls[batch]
    if batch > 1 and len(call.parts) == branches == 1:
        return None
    # In the first step all ranks compute the first branch, whose size is new to them: here is every later one.
    sent = [
        [sent_in_rounds([[call] * branches] * rounds, shape, rank, apart=branches > 1) for rounds in (2, 3)]
        for rank in range(batch * ring * ulysses)
    ]
    return max(after - before for before, after in sent) / 1e9


def rows() -> list[dict[str, Any]]:
    """Gigabytes per step: by model, and by number of ranks."""
    table = []
    for name, model in REAL.items():
        calls = {batch: call_of(model, batch) for batch in (1, 2)}
        for ranks in (2, 4, 8, 16):
            shapes = {
                "Ulysses": (1, 1, ranks),
                "ring": (1, ranks, 1),
                "ring 2 × Ulysses": (1, 2, ranks // 2),
                "batch 2 × Ulysses": (2, 1, ranks // 2),
            }
            sent = {heading: gigabytes(calls, model.branches, shape) for heading, shape in shapes.items()}
            table.append({"model": name, "ranks": ranks, **sent})
    return table


def counted_page(counted: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The table of what was counted, and is what the formula gives."""
    lines = ["| pipeline | " + " | ".join(MESHES) + " |", "| --- |" + " --- |" * len(MESHES)]
    for name, row in counted.items():
        lines.append(f"| {name} | " + " | ".join(f"{largest_per_step(row[label]):,.0f}" for label in MESHES) + " |")
    return lines


def real_page(table: list[dict[str, Any]]) -> list[str]:
    """The table of what real models send."""
    headings = [heading for heading in table[0] if heading not in ("model", "ranks")]
    lines = ["| model | ranks | " + " | ".join(headings) + " |", "| --- |" + " --- |" * (len(headings) + 1)]
    for row in table:
        cells = ["" if row[heading] is None else f"{row[heading]:.2f}" for heading in headings]
        lines.append(f"| {row['model']} | {row['ranks']} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Check, compute, write."""
    counted = json.loads((RESULTS / "pipelines.json").read_text())["pipelines"]
    check(counted)
    table = rows()
    lines = [
        "# What a step sends",
        "",
        (
            "Written by `python -m benchmarks.real_sizes`. One formula for all models (`para_core/planner/traffic.py`): the unmodified "
            "model runs once on one device; from the sizes of its attention calls, what the plan says of their tokens, and the outputs "
            "that are gathered follows what each rank of any mesh will send. Numbers are of the rank that sends most. The digests "
            "(kilobytes) by which ranks compare what they were given, once in a call of a pipeline, are left out."
        ),
        "",
        "## Models of real size",
        "",
        (
            "Gigabytes in bfloat16 per step, all branches of guidance together: diffusers' own classes at the published sizes, run "
            "without data (fake tensors). Mochi's text is taken to be all valid: the most that it sends. Empty: nothing for the ranks "
            "along `batch` to share."
        ),
        "",
        *real_page(table),
        "",
        "## Counted, and by the formula",
        "",
        (
            "Bytes per step, mean of all, counted on the ranks of tiny pipelines by `python -m benchmarks.pipelines`, which ends in an "
            "error unless the formula gives the same number, to the byte, on every rank of every cell. In the first step branches that "
            "are called one after the other run on every rank (`2 batch`)."
        ),
        "",
        *counted_page(counted),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    write_results("real_sizes", {"gigabytes per step": table}, "diffusers")
    print("\n".join(real_page(table)))


if __name__ == "__main__":
    main()
