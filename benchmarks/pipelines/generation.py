"""How far each pipeline's latents are from those that one device generates, on every kind of mesh, and what each rank sends.

    python -m benchmarks.pipelines.generation                    in float32; with --ranks 2 on the meshes of so many only
    python -m benchmarks.pipelines.generation --dtype bfloat16   in bfloat16 too, on two ranks

Pipelines of `zoo.tiny.pipelines.registry`, and the FLUX.1 that was trained here: random weights in float32, three steps, an odd number
of tokens. Error: relative norm of the latents after all steps, against the unmodified pipeline in the same process; the worst rank's.
Bytes: what each rank sends to others in all steps, counted, and by the formula of `para_core.planner.traffic`; the program ends in
an error where they differ. In bfloat16 every run is compared with the unmodified pipeline in float32: an unmodified bfloat16 run has an
error too, and a parallel one should have no larger one. Writes docs/exactness.md and benchmarks/results/pipelines.json, or
pipelines_bfloat16.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.pipelines.bfloat16 import NOT_IN_BFLOAT16, cast, in_bfloat16, noise_of_float32
from benchmarks.pipelines.expected_traffic import observe_pipeline, takes_turns
from benchmarks.traffic import counted_traffic
from para_core.adapters import parallelize_pipe
from para_core.planner.traffic import ModelCall, sent_in_rounds
from zoo.flux import PIPELINE
from zoo.tiny.pipelines.registry import PIPELINES as OTHERS
from zoo.tiny.pipelines.registry import TinyPipeline

# (batch, ring, ulysses) by the heading of the table's column.
MESHES = {
    "2 Ulysses": (1, 1, 2),
    "2 ring": (1, 2, 1),
    "2 batch": (2, 1, 1),
    "3 Ulysses": (1, 1, 3),
    "2 × 2": (1, 2, 2),
}
MESHES_OF_16_BITS = {label: MESHES[label] for label in ("2 Ulysses", "2 ring")}
RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs/exactness.md"


def flux() -> Any:
    """The FLUX.1 that was trained here."""
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


_FLUX_SIZE = {"height": 48, "width": 80, "max_sequence_length": 13}
PIPELINES = {
    "flux": TinyPipeline(flux, _FLUX_SIZE),
    "flux, true guidance": TinyPipeline(
        flux, {**_FLUX_SIZE, "negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    ),
    **OTHERS,
}


def generate(pipe: Any, name: str, *, bfloat16: bool = False) -> Tensor:
    """The latents after all steps."""
    call = PIPELINES[name].call()
    if bfloat16:
        with noise_of_float32():
            return _generate(pipe, cast(call))
    return _generate(pipe, call)


def _generate(pipe: Any, call: dict[str, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Some ControlNets encode their images with noise of the default generator.
        torch.manual_seed(7)
        images = pipe(**call, return_dict=False)[0]
    # FramePack gives the latents of each section.
    return torch.cat(images, dim=2) if isinstance(images, list) else torch.as_tensor(images)


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def worst(error: float) -> float:
    """Of all ranks."""
    errors = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return errors.item()


def measure(
    pipe: Any, name: str, mesh: DeviceMesh, expected: Tensor, rounds: Sequence[Sequence[ModelCall]]
) -> dict[str, Any]:
    """Of one pipeline on one mesh: the error of the worst rank, and what each rank sends in all steps."""
    parallelize_pipe(pipe, mesh=mesh)
    with counted_traffic() as traffic:
        out = generate(pipe, name)
    error = worst(relative_error(out, expected))
    counted = [0] * mesh.size()
    dist.all_gather_object(counted, traffic.bytes)
    batch, ring, ulysses = mesh.shape
    foretold = [
        sent_in_rounds(rounds, (batch, ring, ulysses), rank, apart=takes_turns(pipe)) for rank in range(mesh.size())
    ]
    return {
        "error": error,
        "steps": len(rounds),
        "bytes of each rank": counted,
        "by the formula": foretold,
        "collectives per step": round(traffic.collectives / len(rounds), 1),
    }


def measure_all() -> dict[str, Any]:
    """All pipelines on all meshes of so many ranks."""
    meshes = {
        label: init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses"))
        for label, shape in MESHES.items()
        if torch.tensor(shape).prod() == dist.get_world_size()
    }
    rows = {}
    for name in tqdm(PIPELINES, desc=f"{dist.get_world_size()} ranks", disable=dist.get_rank() != 0):
        pipe = PIPELINES[name].build()
        expected = generate(pipe, name)
        rounds = {
            batch: observe_pipeline(pipe, partial(generate, pipe, name), batch)
            for batch in {mesh.shape[0] for mesh in meshes.values()}
        }
        rows[name] = {
            label: measure(pipe, name, mesh, expected, rounds[mesh.shape[0]]) for label, mesh in meshes.items()
        }
    return rows


def measure_all_in_16_bits() -> dict[str, Any]:
    """Of all pipelines in bfloat16: the unmodified one's error from float32, and on each mesh the parallel one's."""
    meshes = {
        label: init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses"))
        for label, shape in MESHES_OF_16_BITS.items()
    }
    rows = {}
    for name in tqdm(
        [name for name in PIPELINES if name not in NOT_IN_BFLOAT16], desc="bfloat16", disable=dist.get_rank() != 0
    ):
        pipe = PIPELINES[name].build()
        exact = generate(pipe, name)
        pipe = in_bfloat16(pipe)
        alone = generate(pipe, name, bfloat16=True)
        row = {"alone": {"error": relative_error(alone, exact)}}
        for label, mesh in meshes.items():
            out = generate(parallelize_pipe(pipe, mesh=mesh), name, bfloat16=True)
            row[label] = {
                "error": worst(relative_error(out, exact)),
                "from the unmodified": worst(relative_error(out, alone)),
            }
        rows[name] = row
    return rows


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


def write_page() -> None:
    """docs/exactness.md, of what was measured last in either dtype."""
    rows = json.loads((RESULTS / "pipelines.json").read_text())["pipelines"]
    rows_of_16_bits = json.loads((RESULTS / "pipelines_bfloat16.json").read_text())["pipelines"]
    lines = [
        "# Pipelines on several ranks: errors, and what is sent",
        "",
        (
            "Written by `python -m benchmarks.pipelines.generation` (numbers in `benchmarks/results/pipelines.json`): tiny pipelines with random "
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
    ratios = [
        row[label]["error"] / row["alone"]["error"] for row in rows_of_16_bits.values() for label in MESHES_OF_16_BITS
    ]
    lines += [
        "",
        "## In bfloat16",
        "",
        (
            "Written by `python -m benchmarks.pipelines.generation --dtype bfloat16` (numbers in `benchmarks/results/pipelines_bfloat16.json`): the "
            "same pipelines with all their models in bfloat16, from the same noise. The relative error of the latents from the "
            "unmodified pipeline's in float32: of the unmodified pipeline in bfloat16, and of it on two ranks; in brackets how far the "
            "latents on two ranks are from the unmodified bfloat16 ones. Rounding decides both errors: a parallel run is as right "
            f"as an unmodified one while its error is no larger, whatever their distance. Parallel errors are {min(ratios):.2f} to "
            f"{max(ratios):.2f} times the unmodified pipeline's, {median(ratios):.2f} times in the median."
        ),
        "",
        "| pipeline | unmodified | " + " | ".join(MESHES_OF_16_BITS) + " |",
        "| --- | --- |" + " --- |" * len(MESHES_OF_16_BITS),
    ]
    for name, row in rows_of_16_bits.items():
        cells = [f"{row[label]['error']:.2%} ({row[label]['from the unmodified']:.2%})" for label in MESHES_OF_16_BITS]
        lines.append(f"| {name} | {row['alone']['error']:.2%} | " + " | ".join(cells) + " |")
    lines += ["", "Not tried:", "", *[f"- {name}: {reason}" for name, reason in NOT_IN_BFLOAT16.items()]]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Start the ranks of every world size, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 3, 4], choices=(2, 3, 4), help="others stay as they are"
    )
    args = parser.parse_args()
    if args.part is not None:
        write_part(args.part, measure_all if args.dtype == "float32" else measure_all_in_16_bits)
        return
    if args.dtype == "bfloat16":
        found = measured_on_ranks("benchmarks.pipelines.generation", 2, "--dtype", "bfloat16")
        write_results("pipelines_bfloat16", {"pipelines": found}, "diffusers")
        write_page()
        return
    known = json.loads((RESULTS / "pipelines.json").read_text())["pipelines"]
    rows: dict[str, dict[str, dict[str, Any]]] = {name: known.get(name, {}) for name in PIPELINES}
    for ranks in args.ranks:
        for name, row in measured_on_ranks("benchmarks.pipelines.generation", ranks).items():
            rows[name].update(row)
        write_results("pipelines", {"pipelines": rows}, "diffusers")
    check(rows)
    write_page()
    largest = max(cell["error"] for row in rows.values() for cell in row.values())
    print(f"{len(rows)} pipelines on {len(MESHES)} meshes; the largest error is {largest:.1e}. {PAGE}")


if __name__ == "__main__":
    main()
