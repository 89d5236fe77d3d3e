"""Whether several ranks give the bits of one process: every tiny pipeline on every kind of mesh. Writes same_bits.json:

    python -m benchmarks.pipelines.same_bits                                # every cell that the JSON has not: hours
    python -m benchmarks.pipelines.same_bits --ways "Ulysses 2" --only flux --again

A cell is "equal", the relative error of the latents after three steps with an odd number of tokens, or the error that
every rank raised. The expected latents are those of the unmodified pipeline in the same process. Each process has one
thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import (
    largest_over_ranks,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    true_on_all_ranks,
    write_results,
)
from benchmarks.pipelines.latents import IN_BFLOAT16, PIPELINES, generate, in_bfloat16
from para_core.adapters import parallelize_pipe

RESULTS = "same_bits"
# Ranks import diffusers once for so many pipelines.
_BATCH = 12


@dataclass(frozen=True)
class Way:
    """A way to run a pipeline on several ranks.

    Args:
        mesh: The ranks along each dim of the mesh.
        options: Further options of ``parallelize_pipe``.
    """

    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())


_ON = {"same_bits": True}
# Without "off", the option same_bits is on.
WAYS = {
    "Ulysses 2, off": Way({"ring": 1, "ulysses": 2}),
    "Ulysses 2": Way({"ring": 1, "ulysses": 2}, _ON),
    "Ulysses 3": Way({"ring": 1, "ulysses": 3}, _ON),
    "Ulysses 4": Way({"ring": 1, "ulysses": 4}, _ON),
    "ring 2": Way({"ring": 2, "ulysses": 1}, _ON),
    "CFG 2, off": Way({"batch": 2, "ring": 1, "ulysses": 1}),
    "CFG 2": Way({"batch": 2, "ring": 1, "ulysses": 1}, _ON),
}
DTYPES = ("float32", "bfloat16")


def has_bits(out: Tensor, expected: Tensor) -> bool:
    """Return whether both tensors have the same shape, type and bytes."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    return torch.equal(out.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def measure(names: list[str], ways: list[str], dtype: str) -> dict[str, dict[str, str]]:
    """Return for each pipeline and way "equal", or the relative error of the worst rank."""
    meshes = {
        way: init_device_mesh("cpu", tuple(WAYS[way].mesh.values()), mesh_dim_names=tuple(WAYS[way].mesh))
        for way in ways
    }
    cells: dict[str, dict[str, str]] = {}
    for name in names:
        pipe = PIPELINES[name].build()
        if dtype == "bfloat16":
            pipe = in_bfloat16(pipe)
        expected = generate(pipe, name, bfloat16=dtype == "bfloat16")
        cells[name] = {}
        for way in ways:
            try:
                parallelize_pipe(pipe, mesh=meshes[way], **WAYS[way].options)
                out = generate(pipe, name, bfloat16=dtype == "bfloat16")
            except (RuntimeError, ValueError) as error:
                # Every rank raises the same error.
                cells[name][way] = str(error)
                continue
            difference = largest_over_ranks(relative_error(out, expected))
            cells[name][way] = "equal" if true_on_all_ranks(has_bits(out, expected)) else f"{difference:.0e}"
        if dist.get_rank() == 0:
            print(dtype, name, cells[name], flush=True)
    return cells


def run(ways: Iterable[str], dtypes: Iterable[str], only: Iterable[str] | None, *, again: bool) -> None:
    """Measure the cells that the JSON has not, and write them batch by batch."""
    for dtype in dtypes:
        known = PIPELINES if dtype == "float32" else IN_BFLOAT16
        names = [name for name in known if only is None or name in only]
        for ranks in sorted({WAYS[way].ranks for way in ways}):
            on_ranks = [way for way in ways if WAYS[way].ranks == ranks]
            rows = read_results(RESULTS).get(dtype, {})
            missing = [name for name in names if again or not rows.get(name, {}).keys() >= {*on_ranks}]
            for start in range(0, len(missing), _BATCH):
                cells = measure_on_ranks(measure, ranks, missing[start : start + _BATCH], on_ranks, dtype)
                results = read_results(RESULTS)
                rows = results.setdefault(dtype, {})
                for name, row in cells.items():
                    rows[name] = {**rows.get(name, {}), **row}
                results[dtype] = {name: rows[name] for name in known if name in rows}
                write_results(RESULTS, results, "diffusers")


def parts() -> dict[str, list[str]]:
    """Return the table of docs/measured/same_bits.md: how many pipelines have the bits of one process."""
    results = read_results(RESULTS)
    table = []
    for way in WAYS:
        row = [way]
        for dtype in DTYPES:
            cells = [cells[way] for cells in results.get(dtype, {}).values() if way in cells]
            row.append(f"{cells.count('equal')} of {len(cells)}")
        table.append(row)
    return {"same bits": markdown_table(["ranks", *DTYPES], table)}


def main() -> None:
    """Run the named ways."""
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--only", nargs="+", metavar="PIPELINE", help="these pipelines only")
    parser.add_argument("--again", action="store_true", help="measure cells that the JSON has, too")
    options = parser.parse_args()
    run(options.ways, options.dtypes, options.only, again=options.again)
    print("\n".join(parts()["same bits"]))


if __name__ == "__main__":
    main()
