"""Gigabytes that a rank sends per step for models of real size:  python -m benchmarks.planner.traffic

The planner's counts of the models at their published sizes, in its formula, which assumes that all sizes divide evenly.
The exact formula (benchmarks/pipelines/traffic.py) must give the bytes that the tiny pipelines send: if
benchmarks/results/pipelines.json (python -m benchmarks.pipelines.exactness pipelines) has other bytes, this program
ends in an error. Writes benchmarks/results/real_sizes.json (docs/measured/exactness.md).
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from benchmarks.pipelines.latents import MESHES, problems
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.plan_mesh import workload_of
from para_core.adapters.planner.predict import traffic_of

# The number of frames is given if it is not the published one.
REAL: dict[str, dict[str, int]] = {
    "FLUX.1-dev": {},
    "HunyuanVideo": {},
    "CogVideoX-5B": {},
    "Mochi 1": {"frames": 84},
    "Wan 2.1 14B": {},
}
# The page shows these models and ranks of real_sizes.json.
SHOWN_MODELS, SHOWN_RANKS = ("FLUX.1", "HunyuanVideo", "Wan"), (2, 8)


def rows() -> list[dict[str, Any]]:
    """Return the gigabytes per step of the first rank, by model and number of ranks. None means that nothing can be
    shared.
    """
    table = []
    for model, sizes in REAL.items():
        work = workload_of(model, **sizes)
        can_share = work.branches > 1
        for ranks in (2, 4, 8, 16):
            shapes = {
                "Ulysses": MeshShape(ulysses=ranks),
                "ring": MeshShape(ring=ranks),
                "ring, 2-D": MeshShape(ring=ranks, ring_method="2d"),
                "ring 2 × Ulysses": MeshShape(ring=2, ulysses=ranks // 2),
                "batch 2 × Ulysses": MeshShape(batch=2, ulysses=ranks // 2) if can_share else None,
                "stages": MeshShape(pipe=ranks),
            }
            sent = {name: shape and traffic_of(shape, work) / 1e9 for name, shape in shapes.items()}
            table.append({"model": work.name, "ranks": ranks, **sent})
    return table


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/exactness.md on traffic: models of real size, and counted cells."""
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
    """Check the counted bytes, compute, and write."""
    parser_of(__doc__).parse_args()
    differing = problems(read_results("pipelines")["pipelines"])
    if differing:
        raise RuntimeError("\n".join(differing))
    print(write_results("real_sizes", {"gigabytes per step": rows()}, "diffusers"))


if __name__ == "__main__":
    main()
