"""Errors of models of other libraries on 2 and 3 ranks, each by its recipe.

    python -m benchmarks.pipelines.outside

Writes benchmarks/results/outside_models.json (docs/any_model.md).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.harness import (
    largest_over_ranks,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    write_results,
)
from para_core import init_context_parallel_mesh
from zoo.outside.recipes import RECIPES, expected, on_mesh

RANKS, KINDS = (2, 3), ("ring", "ulysses")


def errors_of_ranks() -> dict[str, dict[str, float]]:
    """Return the largest relative error of any rank, by recipe and kind of mesh."""
    meshes = {
        kind: init_context_parallel_mesh("cpu", **{f"max_{kind}_dim_size": dist.get_world_size()}) for kind in KINDS
    }
    found: dict[str, dict[str, float]] = {}
    for recipe in RECIPES:
        alone = expected(recipe)
        found[recipe.name] = {}
        for kind, mesh in meshes.items():
            found[recipe.name][kind] = largest_over_ranks(relative_error(on_mesh(recipe, mesh), alone))
    return found


def parts() -> dict[str, list[str]]:
    """Return the table of docs/any_model.md: the largest error of the models of a recipe on 2 and 3 ranks."""
    recipes: dict[str, list[dict[str, Any]]] = {}
    for row in read_results("outside_models")["rows"]:
        recipes.setdefault(row["way"], []).append(row)
    rows = []
    for way, found in recipes.items():
        errors = [max(row["errors"][f"{ranks} {kind}"] for row in found for ranks in RANKS) for kind in KINDS]
        rows.append([way, "; ".join(row["model"] for row in found), *(f"{error:.0e}" for error in errors)])
    return {
        "outside": markdown_table(["recipe", "models", *(kind.replace("ulysses", "Ulysses") for kind in KINDS)], rows)
    }


def main() -> None:
    """Measure on 2 and 3 ranks and write."""
    parser_of(__doc__).parse_args()
    by_ranks = {ranks: measure_on_ranks(errors_of_ranks, ranks) for ranks in RANKS}
    rows = [
        {
            "model": recipe.model,
            "way": recipe.way,
            "errors": {f"{ranks} {kind}": by_ranks[ranks][recipe.name][kind] for ranks in RANKS for kind in KINDS},
        }
        for recipe in RECIPES
    ]
    print(write_results("outside_models", {"rows": rows}, "transformers"))


if __name__ == "__main__":
    main()
