"""How far each pipeline's latents are from those that one device draws, on every kind of mesh, and what a step sends.

    python -m benchmarks.pipelines

Pipelines of `benchmarks.tiny_pipelines`: random weights in float32, three steps, an odd number of tokens. Error: relative norm of
the latents after all steps, against the unmodified pipeline in the same process; the worst rank's. Bytes: what rank 0 sends to
other ranks, per step. Writes docs/exactness.md and benchmarks/results/pipelines.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.tiny_pipelines import PIPELINES
from benchmarks.traffic import TrafficCounter
from para_core.adapters import parallelize_pipe
from para_core.collectives import all_gather
from para_core.mesh import MeshDim

# (batch, ring, ulysses) by the heading of the table's column.
MESHES = {
    "2 Ulysses": (1, 1, 2),
    "2 ring": (1, 2, 1),
    "2 batch": (2, 1, 1),
    "3 Ulysses": (1, 1, 3),
    "2 × 2": (1, 2, 2),
}
STEPS = 3
PAGE = Path(__file__).parents[1] / "docs/exactness.md"


def draw(pipe: Any, name: str) -> Tensor:
    """The latents after all steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Some ControlNets encode their pictures with noise of the default generator.
        torch.manual_seed(7)
        images = pipe(**PIPELINES[name].call(), return_dict=False)[0]
    # FramePack gives the latents of each section.
    return torch.cat(images, dim=2) if isinstance(images, list) else images


def measure(pipe: Any, name: str, mesh: DeviceMesh, expected: Tensor) -> dict[str, float]:
    """Of one pipeline on one mesh: the error of the worst rank, and bytes and collectives of rank 0."""
    parallelize_pipe(pipe, mesh=mesh)
    branches = 0

    def gather_branches(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: MeshDim) -> Tensor:
        # Asked for inside a tensor's own dispatch, where a dispatch mode sees nothing.
        nonlocal branches
        branches += x.numel() * x.element_size() * (dim.size - 1)
        return all_gather(x, sizes, tensor_dim, dim)

    with TrafficCounter() as traffic, mock.patch("para_core.guidance.all_gather", gather_branches):
        out = draw(pipe, name)
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).reshape(1)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return {
        "error": error.item(),
        "bytes per step": round((traffic.bytes + branches) / STEPS),
        "collectives per step": round(traffic.collectives / STEPS, 1),
    }


def measure_on_these_ranks(path: Path) -> None:
    """All pipelines on all meshes of so many ranks; rank 0 writes them down."""
    dist.init_process_group("gloo")
    meshes = {
        label: init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses"))
        for label, shape in MESHES.items()
        if torch.tensor(shape).prod() == dist.get_world_size()
    }
    rows = {}
    for name in tqdm(PIPELINES, desc=f"{dist.get_world_size()} ranks", disable=dist.get_rank() != 0):
        pipe = PIPELINES[name].build()
        expected = draw(pipe, name)
        rows[name] = {label: measure(pipe, name, mesh, expected) for label, mesh in meshes.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.destroy_process_group()


def write_page(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    """docs/exactness.md."""
    lines = [
        "# Pipelines on several ranks: errors, and what is sent",
        "",
        (
            "Written by `python -m benchmarks.pipelines` (numbers in `benchmarks/results/pipelines.json`): tiny pipelines with random "
            "weights in float32, three steps, an odd number of tokens. The relative error of the latents after all steps, against the "
            "unmodified pipeline; in brackets the kilobytes that one rank sends per step."
        ),
        "",
        "| pipeline | " + " | ".join(MESHES) + " |",
        "| --- |" + " --- |" * len(MESHES),
    ]
    for name, row in rows.items():
        cells = [f"{row[label]['error']:.0e} ({row[label]['bytes per step'] / 1000:.0f})" for label in MESHES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Start the ranks of every world size, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    part = parser.parse_args().part
    if part is not None:
        measure_on_these_ranks(part)
        return
    rows: dict[str, dict[str, dict[str, float]]] = {name: {} for name in PIPELINES}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 3, 4):
            path = Path(folder) / f"{ranks}.json"
            launch("benchmarks.pipelines", ranks, "--part", str(path))
            for name, found in json.loads(path.read_text()).items():
                rows[name].update(found)
    write_results("pipelines", {"steps": STEPS, "pipelines": rows}, "diffusers")
    write_page(rows)
    worst = max(cell["error"] for row in rows.values() for cell in row.values())
    print(f"{len(rows)} pipelines on {len(MESHES)} meshes; the largest error is {worst:.1e}. {PAGE}")


if __name__ == "__main__":
    main()
