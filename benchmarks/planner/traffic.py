"""Gigabytes that a rank sends per step for models of real size, by the formula that the tiny pipelines confirm:

    python -m benchmarks.planner.traffic

The models of diffusers themselves, with the sizes that were published, run once without data
(`benchmarks.pipelines.generation`). Needs benchmarks/results/pipelines.json (python -m benchmarks.pipelines.exactness
pipelines): where the formula gave other bytes than were counted there, it ends in an error. Writes
benchmarks/results/real_sizes.json (docs/measured/exactness.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from benchmarks.pipelines.generation import MESHES, observed, problems
from para_core.adapters.planner.count import without_data
from para_core.adapters.planner.inputs import INPUTS
from para_core.adapters.planner.published import PUBLISHED, PublishedModel
from para_core.adapters.registry import plan_for
from para_core.planner import cost
from para_core.planner.traffic import ModelCall, Shape, sent_in_rounds
from para_core.planner.weights import sent_between_stages


def _frames(model: PublishedModel, frames: int) -> PublishedModel:
    return replace(model, sizes=replace(model.sizes, frames=frames))


REAL = {
    "FLUX.1-dev, 1024 × 1024": PUBLISHED["FLUX.1-dev"],
    "HunyuanVideo, 1280 × 720 × 129": PUBLISHED["HunyuanVideo"],
    "CogVideoX-5B, 720 × 480 × 49": PUBLISHED["CogVideoX-5B"],
    "Mochi 1, 848 × 480 × 84": _frames(PUBLISHED["Mochi 1"], 84),
    "Wan 2.1 14B, 1280 × 720 × 81": PUBLISHED["Wan 2.1 14B"],
}


# The models and ranks of real_sizes.json that the page shows.
SHOWN_MODELS, SHOWN_RANKS = ("FLUX.1", "HunyuanVideo", "Wan"), (2, 8)


def call_of(model: PublishedModel, batch: int) -> ModelCall:
    """Observe one call of the model; ``batch``: shares of its samples, if it has several."""
    with without_data():
        transformer = getattr(diffusers, model.transformer)(**model.config).eval()
        with observed(transformer, batch) as calls:
            transformer(**INPUTS[model.transformer](transformer.config, model.sizes), return_dict=False)
    assert plan_for(transformer) is not None
    return calls[0]


def gigabytes(calls: dict[int, ModelCall], branches: int, shape: Shape, *, two_dims: bool = False) -> float | None:
    """Return the gigabytes per step of the rank that sends most; None if nothing can be shared.

    Args:
        calls: One call by the number of shares of its samples.
    """
    batch, ring, ulysses = shape
    call = calls[batch]
    if batch > 1 and len(call.parts) == branches == 1:
        return None
    # In the first step all ranks compute the first branch, whose size is new to them: here is every later one.
    sent = [
        [
            sent_in_rounds([[call] * branches] * rounds, shape, rank, apart=branches > 1, two_dims=two_dims)
            for rounds in (2, 3)
        ]
        for rank in range(batch * ring * ulysses)
    ]
    return max(after - before for before, after in sent) / 1e9


def rows() -> list[dict[str, Any]]:
    """Return gigabytes per step by model and number of ranks."""
    table = []
    for name, model in REAL.items():
        calls = {batch: call_of(model, batch) for batch in (1, 2)}
        for ranks in (2, 4, 8, 16):
            shapes = {
                "Ulysses": (1, 1, ranks),
                "ring": (1, ranks, 1),
                "ring, 2-D": (1, ranks, 1),
                "ring 2 × Ulysses": (1, 2, ranks // 2),
                "batch 2 × Ulysses": (2, 1, ranks // 2),
            }
            sent = {
                heading: gigabytes(calls, model.branches, shape, two_dims="2-D" in heading)
                for heading, shape in shapes.items()
            }
            sent["stages"] = sent_between_stages(calls[1].parts[0], model.branches, cost.MeshShape(pipe=ranks)) / 1e9
            table.append({"model": name, "ranks": ranks, **sent})
    return table


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/exactness.md on traffic: models of real size, and how many cells were
    counted.
    """
    table, counted = read_results("real_sizes")["gigabytes per step"], read_results("pipelines")["pipelines"]
    headings = [heading for heading in table[0] if heading not in ("model", "ranks")]
    real = [
        [row["model"], row["ranks"], *("" if row[x] is None else f"{row[x]:.2f}" for x in headings)]
        for row in table
        if row["ranks"] in SHOWN_RANKS and row["model"].startswith(SHOWN_MODELS)
    ]
    cells = sum(map(len, counted.values()))
    summary = (
        f"{cells} cells ({len(counted)} tiny pipelines, {len(MESHES)} meshes) were counted on every rank. In "
        f"{cells - len(problems(counted))} of them the formula gives the same number of bytes."
    )
    return {"real sizes": markdown_table(["model", "ranks", *headings], real), "counted": [summary]}


def main() -> None:
    """Check what was counted, compute and write."""
    parser_of(__doc__).parse_args()
    differing = problems(read_results("pipelines")["pipelines"])
    if differing:
        raise RuntimeError("\n".join(differing))
    print(write_results("real_sizes", {"gigabytes per step": rows()}, "diffusers"))


if __name__ == "__main__":
    main()
