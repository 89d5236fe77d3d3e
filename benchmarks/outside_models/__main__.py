"""How far models of other libraries are from one device on 2 and 3 ranks, each by its recipe.

    python -m benchmarks.outside_models

Writes ``benchmarks/results/outside_models.json`` and the table of docs/any_model.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.outside_models.table import KINDS, RANKS, table
from benchmarks.page_parts import fill
from para_core import init_context_parallel_mesh
from zoo.outside.recipes import RECIPES, expected, on_mesh

PAGE = Path(__file__).parents[2] / "docs/any_model.md"


def errors_of_ranks() -> dict[str, dict[str, float]]:
    """The largest relative error of any rank, by recipe and kind of mesh."""
    meshes = {
        kind: init_context_parallel_mesh("cpu", **{f"max_{kind}_dim_size": dist.get_world_size()}) for kind in KINDS
    }
    found: dict[str, dict[str, float]] = {}
    for recipe in RECIPES:
        alone = expected(recipe)
        found[recipe.name] = {}
        for kind, mesh in meshes.items():
            error = (on_mesh(recipe, mesh) - alone).norm() / alone.norm()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            found[recipe.name][kind] = float(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        torch.set_num_threads(1)
        write_part(arguments.part, errors_of_ranks)
        return
    by_ranks = {ranks: measured_on_ranks("benchmarks.outside_models", ranks) for ranks in RANKS}
    rows = [
        {
            "model": recipe.model,
            "way": recipe.way,
            "errors": {f"{ranks} {kind}": by_ranks[ranks][recipe.name][kind] for ranks in RANKS for kind in KINDS},
        }
        for recipe in RECIPES
    ]
    write_results("outside_models", {"rows": rows}, "transformers")
    PAGE.write_text(fill(PAGE.read_text(), {"outside": table(rows)}))


if __name__ == "__main__":
    main()
