"""Seconds and memory of published models by device and number of ranks, predicted:  python -m benchmarks.planner.sizes

- machines.json (docs/which_option.md): the planner's best mesh for each model and machine, and the bytes that a rank
  holds.
- weights_memory.json (docs/weights.md): gigabytes of weights that a rank holds and receives per step, by method.

Nothing runs on a GPU, and nothing is downloaded.
"""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.adapters.planner.choose import Choices
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.plan_mesh import workload_of
from para_core.adapters.planner.predict import Machine, Prediction, predict, traffic_of
from para_core.adapters.planner.predictions import duration, predict_meshes
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import Workload
from para_core.devices import RESERVED, device_named, link_named

MODELS = ("FLUX.1-dev", "FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B", "Wan 2.2 TI2V 5B", "CogVideoX-5B")
# Each machine has the device, its link (None for the usual one), and numbers of ranks, all in one host.
MACHINES: tuple[tuple[str, str | None, tuple[int, ...]], ...] = (
    ("RTX 4090", "pcie4 via host", (2, 4, 8)),
    ("L40S", "pcie4", (2, 4, 8)),
    ("A100", None, (2, 4, 8)),
    ("H100", None, (2, 4, 8)),
    ("B200", None, (2, 4, 8)),
)
RANKS = (1, 2, 4, 8)
# The page shows these models and numbers of ranks of machines.json.
SHOWN_MODELS, SHOWN_RANKS = ("FLUX.1-dev", "FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B"), (2, 4, 8)
# The bytes of common devices.
DEVICE_BYTES = (24e9, 48e9, 80e9, 141e9, 180e9)


# -- The best mesh of each machine.


def best(work: Workload, machine: Machine, ranks: int) -> dict[str, Any]:
    """Return the fastest exact row, and the fastest with int8 weights."""
    cells: dict[str, Any] = {"one rank": predict(MeshShape(), work, machine).seconds}
    for name, choices in (("exact", Choices()), ("int8", Choices(quantize="int8"))):
        best_row = predict_meshes(work, machine, ranks, choices).best
        cells[name] = {"row": str(best_row), "seconds": best_row.seconds, "fits": best_row.runs}
    return cells


def held(row: Prediction) -> float | None:
    """Return the bytes of a rank, if the mesh can run."""
    return None if row.problem else row.memory


def plan_all() -> dict[str, Any]:
    """Return all plans of all models."""
    machines, memory = {}, {}
    for model in MODELS:
        work = workload_of(model)
        machines[work.name] = {
            f"{ranks} × {name}": best(work, machine_of(name, link, ranks), ranks)
            for name, link, counts in MACHINES
            for ranks in (1, *counts)
        }
        machine = machine_of("H100", None, max(RANKS))
        memory[work.name] = {
            "weights": work.weights.at_rest(MeshShape(), Placement()),
            "replicated": {ranks: held(predict(MeshShape(ring=ranks), work, machine)) for ranks in RANKS},
            "tensor": {ranks: held(predict(MeshShape(tensor=ranks), work, machine)) for ranks in RANKS[1:]},
        }
        print(work.name, flush=True)
    return {"machines": machines, "memory": memory}


def machine_of(name: str, link: str | None, ranks: int) -> Machine:
    """Return a machine that runs compiled models, with all ranks in one host."""
    device = device_named(name)
    return Machine(device, link_named(link, device), link_named(None, device), ranks)


def machines_table(results: dict[str, Any], kind: str) -> list[str]:
    """Return a row per model and device, with a column per number of ranks.

    Args:
        kind: ``"exact"`` or ``"int8"``. With int8, a model whose seconds are those of exact weights has no row.
    """
    rows, equal = [], []
    for model in SHOWN_MODELS:
        name, cells = next((name, cells) for name, cells in results["machines"].items() if name.startswith(model))
        for device, _, counts in MACHINES if kind == "exact" else MACHINES[:1]:
            options = [cells[f"{ranks} × {device}"] for ranks in (1, *counts)]
            if kind == "int8" and all(math.isclose(x["int8"]["seconds"], x["exact"]["seconds"]) for x in options):
                equal.append(name)
                continue
            rows.append([name, device, *(_option(option, kind) for option in options)])
            name = ""
    lines = markdown_table(["model", "device", "1 rank", *(f"{ranks} ranks" for ranks in SHOWN_RANKS)], rows)
    return [*lines, "", f"As fast as with exact weights: {'; '.join(equal)}."] if equal else lines


def _option(cell: dict[str, Any], kind: str) -> str:
    seconds = cell[kind]["seconds"]
    rounded = duration(60 * round(seconds / 60)).removesuffix(" 0 s") if seconds > 600 else duration(seconds)
    if not cell[kind]["fits"]:
        return "does not fit"
    row = cell[kind]["row"].replace(", int8 (not exact)", "").replace("text encoders ", "encoders ")
    row = re.sub(r"blocks offloaded \((\d+ resident)\)", r"\1", row.removeprefix("one rank").removeprefix(", "))
    return f"{row}{': ' * bool(row)}{rounded} ({cell['one rank'] / seconds:.2f}×)"


def memory_table(results: dict[str, Any]) -> list[str]:
    """Return the gigabytes of a rank, and the smallest device that has them, replicated on one and on most ranks."""
    ends = RANKS[:: len(RANKS) - 1]
    heads = [*(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in ends), *(f"tensor {ranks}" for ranks in RANKS[1:])]
    rows = [
        [
            model,
            f"{row['weights'] / 1e9:.0f}",
            *(_held(row["replicated"][str(ranks)]) for ranks in ends),
            *map(_held, row["tensor"].values()),
        ]
        for model, row in results["memory"].items()
    ]
    return markdown_table(["model", "weights", *heads], rows, right=range(1, 2 + len(heads)))


def _held(memory: float | None) -> str:
    if memory is None:
        return "–"
    device = next((f"{size / 1e9:.0f}" for size in DEVICE_BYTES if memory <= size - RESERVED), "none")
    return f"{memory / 1e9:.0f} ({device})"


# -- Weights by method.

WEIGHT_RANKS = (2, 4, 8)
CARDS = (24, 48, 80)
# These gigabytes of a card are kept for activations, CUDA and NCCL.
RESERVED_GB = 6
# These are the gigabytes per second that a rank receives in a collective: NCCL reaches so much of 32, 64 and 450 GB/s.
LINKS = {"PCIe 4": 22.0, "PCIe 5": 45.0, "NVLink 4": 350.0}
SHARDED = ("FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B", "Qwen-Image")


def weights_row(work: Workload) -> dict[str, Any]:
    """Return gigabytes of weights on a rank by number of ranks, and gigabytes received per step by method."""
    weights, placement = work.weights, Placement("fsdp")
    fsdp, sent = {}, {ranks: traffic_of(MeshShape(tensor=ranks), work) for ranks in WEIGHT_RANKS}
    for ranks in WEIGHT_RANKS:
        shape = MeshShape(ring=ranks, fsdp=True)
        # A rank either denoises or encodes, so the larger of both counts.
        fsdp[ranks] = (weights.at_rest(shape, placement) + max(weights.while_running(shape, placement))) / 1e9
    _, passes = work.call_on_rank(1)
    received = {
        "fsdp": {ranks: passes * weights.transformer.gathered(ranks) / 1e9 for ranks in WEIGHT_RANKS},
        "tensor": {ranks: bytes_sent / 1e9 for ranks, bytes_sent in sent.items()},
    }
    one_copy = weights.at_rest(MeshShape(), Placement()) / 1e9
    return {"one copy": one_copy, "held": {"fsdp": fsdp}, "received per step": received}


def fits(held: float) -> str:
    return next((str(card) for card in CARDS if held + RESERVED_GB <= card), "none")


def held_table(models: dict[str, dict[str, Any]]) -> list[str]:
    """Return the gigabytes of weights on a rank, and the smallest card for them, replicated and with fsdp."""
    rows = []
    for name, sizes in models.items():
        held = [sizes["one copy"], *(sizes["held"]["fsdp"][str(n)] for n in WEIGHT_RANKS)]
        rows.append([name, *(f"{x:.0f} ({fits(x)})" for x in held)])
    heads = ["model", "replicate", *(f"fsdp, {n} ranks" for n in WEIGHT_RANKS)]
    return markdown_table(heads, rows, right=range(1, 5))


def sent_table(models: dict[str, dict[str, Any]]) -> list[str]:
    """Return the gigabytes per step on 2 / 4 / 8 ranks, and the seconds that these take on each link on 8 ranks."""
    rows = []
    for name, sizes in models.items():
        for method, received in sizes["received per step"].items():
            sent = [received[str(n)] for n in WEIGHT_RANKS]
            seconds = [f"{sent[-1] / speed:.2f}" for speed in LINKS.values()]
            rows.append([name if method == "fsdp" else "", method, " / ".join(f"{x:.0f}" for x in sent), *seconds])
    return markdown_table(["model", "method", "GB", *(f"{link}, s" for link in LINKS)], rows, right=range(2, 6))


def error_sentence() -> list[str]:
    """Return a sentence on the error of predicted seconds, from planner_check.json."""
    check = read_results("planner_check")
    errors, (least, most) = check["errors"], check["ratios"]["compiled"]
    fitted = (
        f"Of {errors['rows']} published rows the error is {errors['median']:.0%} in the median and "
        f"{errors['worst']:.0%} at worst, once each table is fitted on one device."
    )
    return [fitted, f"Without a fit, published compiled runs took {least:g} to {most:g} times the predicted seconds."]


def hops_table() -> list[str]:
    """Return the number of tokens per rank from which a ring hop hides behind attention, by device and usual link.

    A hop sends 2 · S · H · D elements of 2 bytes, and a rank attends to them in 4 · S² · H · D operations. So the hop
    hides from S = operations per second / bytes per second on.
    """
    rows = []
    for name, *_ in MACHINES:
        device = device_named(name)
        link, speed = link_named(None, device), device.attention_speed
        bandwidth = link.all_to_all or link.bandwidth
        tokens = speed / bandwidth
        rows.append([name, link.name, f"{speed / 1e12:,.0f}", f"{bandwidth / 1e9:,.0f}", f"{round(tokens, -2):,.0f}"])
    heads = ["device", "link", "attention, TFLOP/s", "link, GB/s", "tokens of a rank"]
    return markdown_table(heads, rows, right=(2, 3, 4))


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/which_option.md and docs/weights.md."""
    machines, models = read_results("machines"), read_results("weights_memory")["gigabytes"]
    return {
        "error": error_sentence(),
        "hops": hops_table(),
        "machines": machines_table(machines, "exact"),
        "int8": machines_table(machines, "int8"),
        "memory": memory_table(machines),
        "held": held_table(models),
        "sent": sent_table(models),
    }


def main() -> None:
    """Count, predict and write."""
    parser_of(__doc__).parse_args()
    print(write_results("machines", plan_all(), "diffusers"))
    rows = {work.name: weights_row(work) for work in map(workload_of, SHARDED)}
    print(write_results("weights_memory", {"gigabytes": rows}, "diffusers"))


if __name__ == "__main__":
    main()
