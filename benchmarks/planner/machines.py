"""Which option for which machine, and memory per rank, as the planner predicts them:  python -m benchmarks.planner.machines [--pages]

Nothing runs on a GPU and nothing is fetched: operations and bytes are counted on models without weights, at published sizes. Writes
benchmarks/results/machines.json, and the tables of docs/which_option.md and docs/memory.md; with --pages the tables alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, write_results
from benchmarks.page_parts import fill
from para_core.adapters.planner.plan import workload
from para_core.planner.cost import Machine, Runtime, Shape
from para_core.planner.hardware import Host, Topology, device_named, link_named
from para_core.planner.mesh_plan import MeshPlan, Row, make_plan, predict

DOCS = Path(__file__).parents[2] / "docs"
MODELS = ("FLUX.1-dev", "FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B", "Wan 2.2 TI2V 5B", "CogVideoX-5B")
# The device, its link (left out: the usual one), and numbers of ranks; as many in one host.
MACHINES: tuple[tuple[str, str | None, tuple[int, ...]], ...] = (
    ("RTX 4090", "pcie4 via host", (2, 4, 8)),
    ("L40S", "pcie4", (2, 4, 8)),
    ("A100", None, (2, 4, 8)),
    ("H100", None, (2, 4, 8)),
    ("B200", None, (2, 4, 8)),
    ("GB200", None, (8, 72)),
)
RANKS = (1, 2, 4, 8)
# Bytes of common devices, and what the planner leaves to CUDA, NCCL and fragments.
SIZES = (24e9, 48e9, 80e9, 141e9, 180e9)
RESERVED = 6e9


def options(shape: Shape) -> str:
    """As ``init_context_parallel_mesh`` is given it."""
    sizes = {"batch": shape.batch, "ring": shape.ring, "ulysses": shape.ulysses, "tensor": shape.tensor}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def best(plan: MeshPlan) -> dict[str, Any]:
    """The first row of a plan, whether it fits, and its advice."""
    row, one = plan.best, plan.fewer[1]
    return {
        "options": options(row.shape),
        "seconds": row.seconds,
        "one rank": one.seconds,
        "one rank fits": one.memory <= plan.machine.device.memory - RESERVED,
        "bytes held": row.memory,
        "fits": row.memory <= plan.machine.device.memory - RESERVED,
        "enough ranks": plan.fastest.shape.ranks,
    }


def held(row: Row) -> float | None:
    """Bytes of a rank, if the mesh can run."""
    return None if row.problem else row.memory


def count() -> dict[str, Any]:
    """All plans of all models."""
    machines, memory = {}, {}
    for model in MODELS:
        work = workload(model)
        machines[work.name] = {
            f"{ranks} × {name}": best(make_plan(work, machine_of(name, link, ranks), ranks))
            for name, link, counts in MACHINES
            for ranks in counts
        }
        machine = machine_of("H100", None, max(RANKS))
        memory[work.name] = {
            "weights": work.weights + work.other_weights,
            "replicated": {ranks: held(predict(Shape(ring=ranks), work, machine)) for ranks in RANKS},
            "tensor": {ranks: held(predict(Shape(tensor=ranks), work, machine)) for ranks in RANKS[1:]},
        }
        print(work.name, flush=True)
    return {"machines": machines, "memory": memory}


def machine_of(name: str, link: str | None, ranks: int) -> Machine:
    """Compiled, all ranks in one host."""
    device = device_named(name)
    topology = Topology(link_named(link, device), link_named(None, device), ranks)
    return Machine(device, topology, Host(), Runtime(compiled=True))


def machines_table(found: dict[str, Any]) -> list[str]:
    """A row per model and device, a column per number of ranks."""
    lines = []
    for model, cells in found["machines"].items():
        lines += ["", f"**{model}**", "", "| machine | one GPU, s | option | s | speed-up | GB held |"]
        lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
        lines += [f"| {machine} | {_one(cell)} | {_option(cell)} |" for machine, cell in cells.items()]
    return lines[1:]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _one(cell: dict[str, Any]) -> str:
    return _seconds(cell["one rank"]) if cell["one rank fits"] else "does not fit"


def _option(cell: dict[str, Any]) -> str:
    gigabytes = f"{cell['bytes held'] / 1e9:.0f}"
    if not cell["fits"]:
        return f'`weights="fsdp"`: no mesh fits | | | {gigabytes}'
    speed_up = f"{cell['one rank'] / cell['seconds']:.2f} ×"
    return f"{cell['options']} | {_seconds(cell['seconds'])} | {speed_up} | {gigabytes}"


def memory_table(found: dict[str, Any]) -> list[str]:
    """Gigabytes of a rank, and the smallest device that has them."""
    heads = [*(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS), *(f"tensor {ranks}" for ranks in RANKS[1:])]
    lines = [f"| model | weights | {' | '.join(heads)} |", "| --- " + "| ---: " * (1 + len(heads)) + "|"]
    for model, row in found["memory"].items():
        cells = [*row["replicated"].values(), *row["tensor"].values()]
        lines.append(f"| {model} | {row['weights'] / 1e9:.0f} | {' | '.join(map(_held, cells))} |")
    return lines


def _held(memory: float | None) -> str:
    if memory is None:
        return "–"
    device = next((f"{size / 1e9:.0f}" for size in SIZES if memory <= size - RESERVED), "none")
    return f"{memory / 1e9:.0f} ({device})"


def render_option(text: str, found: dict[str, Any]) -> str:
    """docs/which_option.md."""
    return fill(text, {"machines": machines_table(found)})


def render_memory(text: str, found: dict[str, Any]) -> str:
    """docs/memory.md."""
    return fill(text, {"memory": memory_table(found)})


def main() -> None:
    """Count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="only write the tables anew, of what was counted last")
    if not parser.parse_args().pages:
        print(write_results("machines", count(), "diffusers"))
    found = json.loads((RESULTS / "machines.json").read_text())
    for name, render in (("which_option", render_option), ("memory", render_memory)):
        page = DOCS / f"{name}.md"
        page.write_text(render(page.read_text(), found))


if __name__ == "__main__":
    main()
