"""How far each pipeline's latents are from those that one device draws, on every kind of mesh, and what each rank sends.

    python -m benchmarks.pipelines

Pipelines of `benchmarks.tiny_pipelines`, and the FLUX.1 that was trained here: random weights in float32, three steps, an odd number
of tokens. Error: relative norm of the latents after all steps, against the unmodified pipeline in the same process; the worst rank's.
Bytes: what each rank sends to others in all steps, counted, and by the formula of `benchmarks.expected_traffic`; the program ends in
an error where they differ. Writes docs/exactness.md and benchmarks/results/pipelines.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from benchmarks.environment import write_results
from benchmarks.expected_traffic import ModelCall, observe_pipeline, sent_in_rounds, takes_turns
from benchmarks.launch import launch
from benchmarks.tiny_pipelines import PIPELINES as OTHERS
from benchmarks.tiny_pipelines import TinyPipeline
from benchmarks.traffic import counted_traffic
from para_core.adapters import parallelize_pipe

# (batch, ring, ulysses) by the heading of the table's column.
MESHES = {
    "2 Ulysses": (1, 1, 2),
    "2 ring": (1, 2, 1),
    "2 batch": (2, 1, 1),
    "3 Ulysses": (1, 1, 3),
    "2 × 2": (1, 2, 2),
}
PAGE = Path(__file__).parents[1] / "docs/exactness.md"


def flux() -> Any:
    """The FLUX.1 that was trained here."""
    pipe = FluxPipeline.from_pretrained(Path(__file__).parent / "tiny_flux" / "pipeline", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


_FLUX_SIZE = {"height": 24, "width": 40, "max_sequence_length": 13}
PIPELINES = {
    "flux": TinyPipeline(flux, _FLUX_SIZE),
    "flux, true guidance": TinyPipeline(
        flux, {**_FLUX_SIZE, "negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    ),
    **OTHERS,
}


def draw(pipe: Any, name: str) -> Tensor:
    """The latents after all steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Some ControlNets encode their pictures with noise of the default generator.
        torch.manual_seed(7)
        images = pipe(**PIPELINES[name].call(), return_dict=False)[0]
    # FramePack gives the latents of each section.
    return torch.cat(images, dim=2) if isinstance(images, list) else images


def measure(
    pipe: Any, name: str, mesh: DeviceMesh, expected: Tensor, rounds: Sequence[Sequence[ModelCall]]
) -> dict[str, Any]:
    """Of one pipeline on one mesh: the error of the worst rank, and what each rank sends in all steps."""
    parallelize_pipe(pipe, mesh=mesh)
    with counted_traffic() as traffic:
        out = draw(pipe, name)
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).reshape(1)
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    counted = [0] * mesh.size()
    dist.all_gather_object(counted, traffic.bytes)
    batch, ring, ulysses = mesh.shape
    foretold = [
        sent_in_rounds(rounds, (batch, ring, ulysses), rank, apart=takes_turns(pipe)) for rank in range(mesh.size())
    ]
    return {
        "error": error.item(),
        "steps": len(rounds),
        "bytes of each rank": counted,
        "by the formula": foretold,
        "collectives per step": round(traffic.collectives / len(rounds), 1),
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
        rounds = {
            batch: observe_pipeline(pipe, partial(draw, pipe, name), batch)
            for batch in {mesh.shape[0] for mesh in meshes.values()}
        }
        rows[name] = {
            label: measure(pipe, name, mesh, expected, rounds[mesh.shape[0]]) for label, mesh in meshes.items()
        }
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.destroy_process_group()


def largest_per_step(cell: dict[str, Any]) -> float:
    """Bytes that the rank which sends most sends per step."""
    return max(cell["bytes of each rank"]) / cell["steps"]


def check(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Raise ``RuntimeError`` where a rank sent other bytes than the formula gives."""
    differing = [
        f"{name} on {label}: {cell['bytes of each rank']} bytes were counted; the formula gives {cell['by the formula']}."
        for name, row in rows.items()
        for label, cell in row.items()
        if cell["bytes of each rank"] != cell["by the formula"]
    ]
    if differing:
        raise RuntimeError("\n".join(differing))


def write_page(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """docs/exactness.md."""
    lines = [
        "# Pipelines on several ranks: errors, and what is sent",
        "",
        (
            "Written by `python -m benchmarks.pipelines` (numbers in `benchmarks/results/pipelines.json`): tiny pipelines with random "
            "weights in float32, three steps, an odd number of tokens. The relative error of the latents after all steps, against the "
            "unmodified pipeline; in brackets the kilobytes that one rank, the one that sends most, sends per step ([traffic.md](traffic.md))."
        ),
        "",
        "| pipeline | " + " | ".join(MESHES) + " |",
        "| --- |" + " --- |" * len(MESHES),
    ]
    for name, row in rows.items():
        cells = [f"{row[label]['error']:.0e} ({largest_per_step(row[label]) / 1000:.0f})" for label in MESHES]
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
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in PIPELINES}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 3, 4):
            path = Path(folder) / f"{ranks}.json"
            launch("benchmarks.pipelines", ranks, "--part", str(path))
            for name, found in json.loads(path.read_text()).items():
                rows[name].update(found)
    check(rows)
    write_results("pipelines", {"pipelines": rows}, "diffusers")
    write_page(rows)
    worst = max(cell["error"] for row in rows.values() for cell in row.values())
    print(f"{len(rows)} pipelines on {len(MESHES)} meshes; the largest error is {worst:.1e}. {PAGE}")


if __name__ == "__main__":
    main()
