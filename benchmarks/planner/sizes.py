"""Seconds and memory of published models by device and number of ranks, predicted:  python -m benchmarks.planner.sizes

- machines.json (docs/which_option.md): the planner's best mesh for each model and machine, and the bytes that a rank
  holds.
- weights_memory.json (docs/weights.md): gigabytes of weights that a rank holds and receives per step, by method.
  Parameters are counted on the models of diffusers and transformers at the published sizes, on the meta device.

Nothing runs on a GPU, and nothing is downloaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import diffusers
import torch
from torch import nn

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.adapters.components import blocks_of
from para_core.adapters.planner import encoders
from para_core.adapters.planner.workload import workload
from para_core.adapters.registry import tensor_plan_for
from para_core.planner.choices import Choices
from para_core.planner.cost import Machine, MeshShape, Runtime
from para_core.planner.hardware import Host, Topology, device_named, link_named
from para_core.planner.mesh_plan import duration, make_plan
from para_core.planner.prediction import MeshPrediction, Workload, predict
from para_core.planner.weights import Placement
from para_core.plans.module_matching import matching_modules

MODELS = ("FLUX.1-dev", "FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B", "Wan 2.2 TI2V 5B", "CogVideoX-5B")
# The device, its link (left out: the usual one), and numbers of ranks; as many in one host.
MACHINES: tuple[tuple[str, str | None, tuple[int, ...]], ...] = (
    ("RTX 4090", "pcie4 via host", (2, 4, 8)),
    ("L40S", "pcie4", (2, 4, 8)),
    ("A100", None, (2, 4, 8)),
    ("H100", None, (2, 4, 8)),
    ("B200", None, (2, 4, 8)),
)
RANKS = (1, 2, 4, 8)
# The models and numbers of ranks of machines.json that the page shows.
SHOWN_MODELS, SHOWN_RANKS = ("FLUX.1-dev", "FLUX.2-dev", "HunyuanVideo", "Wan 2.2 A14B"), (2, 4, 8)
# Bytes of common devices, and what the planner leaves to CUDA, NCCL and fragments.
DEVICE_BYTES = (24e9, 48e9, 80e9, 141e9, 180e9)
RESERVED = 6e9


# -- the best mesh of each machine


def best(work: Workload, machine: Machine, ranks: int) -> dict[str, Any]:
    """Return the fastest exact row, and the fastest with int8 weights."""
    cells: dict[str, Any] = {"one rank": predict(MeshShape(), work, machine).seconds}
    for name, choices in (("exact", Choices()), ("int8", Choices(quantize="int8"))):
        plan = make_plan(work, machine, ranks, choices)
        cells[name] = {
            "row": str(plan.best),
            "seconds": plan.best.seconds,
            "bytes held": plan.best.memory,
            "bytes in host memory": plan.best.host_memory,
            "fits": plan.runs(plan.best),
            "enough ranks": plan.fastest.shape.ranks,
        }
    return cells


def held(row: MeshPrediction) -> float | None:
    """Return bytes of a rank, if the mesh can run."""
    return None if row.problem else row.memory


def plan_all() -> dict[str, Any]:
    """Return all plans of all models."""
    machines, memory = {}, {}
    for model in MODELS:
        work = workload(model)
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
    topology = Topology(link_named(link, device), link_named(None, device), ranks)
    return Machine(device, topology, Host(), Runtime(compiled=True))


def machines_table(found: dict[str, Any], kind: str) -> list[str]:
    """Return a row per model and device, a column per number of ranks.

    Args:
        kind: ``"exact"`` or ``"int8"``. With int8, a model whose seconds are those of exact weights has no row.
    """
    rows, equal = [], []
    for model in SHOWN_MODELS:
        name, cells = next((name, cells) for name, cells in found["machines"].items() if name.startswith(model))
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


def memory_table(found: dict[str, Any]) -> list[str]:
    """Return gigabytes of a rank, and the smallest device that has them, replicated on one and on most ranks."""
    ends = RANKS[:: len(RANKS) - 1]
    heads = [*(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in ends), *(f"tensor {ranks}" for ranks in RANKS[1:])]
    rows = [
        [
            model,
            f"{row['weights'] / 1e9:.0f}",
            *(_held(row["replicated"][str(ranks)]) for ranks in ends),
            *map(_held, row["tensor"].values()),
        ]
        for model, row in found["memory"].items()
    ]
    return markdown_table(["model", "weights", *heads], rows, right=range(1, 2 + len(heads)))


def _held(memory: float | None) -> str:
    if memory is None:
        return "–"
    device = next((f"{size / 1e9:.0f}" for size in DEVICE_BYTES if memory <= size - RESERVED), "none")
    return f"{memory / 1e9:.0f} ({device})"


# -- weights by method

BYTES = 2  # of a weight or an activation in bfloat16
WEIGHT_RANKS = (2, 4, 8)
CARDS = (24, 48, 80)
# Gigabytes of a card that are kept for activations, the autoencoder, CUDA and NCCL.
RESERVED_GB = 6
# Gigabytes per second that a rank receives in a collective: what NCCL reaches of 32, 64 and 450 GB/s.
LINKS = {"PCIe 4": 22.0, "PCIe 5": 45.0, "NVLink 4": 350.0}
# Outside of the blocks, smaller weights are not sharded by FSDP2 (para_core/weights/fsdp.py).
LARGE = 2**20


@dataclass(frozen=True)
class ShardedModel:
    """The size of a published pipeline and of one of its calls.

    Args:
        transformers: how many the pipeline has.
        tokens: of one call, text and image.
        calls: of a transformer per step.
    """

    cls: str
    encoder: Callable[[], nn.Module]
    tokens: int
    transformers: int = 1
    calls: int = 1
    config: dict[str, Any] = field(default_factory=dict)


SHARDED = {
    "FLUX.2 [dev], 1024 × 1024": ShardedModel("Flux2Transformer2DModel", encoders.MISTRAL, 64 * 64 + 512),
    "HunyuanVideo, 1280 × 720 × 129": ShardedModel(
        "HunyuanVideoTransformer3DModel", encoders.LLAMA, 33 * 45 * 80 + 256
    ),
    "Wan 2.2 A14B, 1280 × 720 × 81": ShardedModel(
        "WanTransformer3DModel", encoders.UMT5, 21 * 45 * 80, transformers=2, calls=2
    ),
    "Qwen-Image, 1328 × 1328": ShardedModel("QwenImageTransformer2DModel", encoders.QWEN, 83 * 83 + 128, calls=2),
}


@dataclass(frozen=True)
class Sizes:
    """Parameters of one module: all, those that FSDP2 shards, those that are gathered at once (a block, its buffer,
    the next block and the root), and those that tensor ranks share."""

    total: int
    sharded: int
    at_once: int
    tensor: int
    reduced: int  # all-reduced activations per token of one call

    def fsdp(self, ranks: int) -> float:
        """Return the parameters held at most while the module runs."""
        return self.total - self.sharded + self.sharded / ranks + self.at_once

    def at_rest(self, ranks: int) -> float:
        return self.total - self.sharded + self.sharded / ranks

    def tensor_parallel(self, ranks: int) -> float:
        return self.total - self.tensor + self.tensor / ranks


def count(parameters: Any) -> int:
    return sum(x.numel() for x in {id(x): x for x in parameters}.values())


def sizes_of(module: nn.Module) -> Sizes:
    blocks = blocks_of(module)
    of_blocks = [count(block.parameters()) for block in blocks]
    inside = {id(x) for block in blocks for x in block.parameters()}
    root = count(x for x in module.parameters() if id(x) not in inside and x.numel() >= LARGE)
    gathered = max(2 * first + second for first, second in pairwise(of_blocks))
    plan, tensor, reduced = tensor_plan_for(module), 0, 0
    for name, style in plan.linears.items() if plan is not None else ():
        for linear in matching_modules(module, name).values():
            tensor += linear.weight.numel()
            # Activations summed over the ranks. The text stream has few tokens and is left out.
            if style.along == "rowwise" and not any(part in name for part in ("context", "add_out", "txt", "refiner")):
                reduced += linear.weight.shape[0]
    return Sizes(count(module.parameters()), sum(of_blocks) + root, root + gathered, tensor, reduced)


def row(model: ShardedModel) -> dict[str, Any]:
    """Return gigabytes of weights on a rank by method and ranks, and gigabytes received per step."""
    with torch.device("meta"):
        transformer = sizes_of(getattr(diffusers, model.cls)(**model.config))
        encoder = sizes_of(model.encoder())
    giga = BYTES / 1e9
    one_copy = giga * (transformer.total * model.transformers + encoder.total)
    held: dict[str, dict[int, float]] = {"fsdp": {}, "tensor": {}}
    sent: dict[str, dict[int, float]] = {"fsdp": {}, "tensor": {}}
    for ranks in WEIGHT_RANKS:
        resting = transformer.at_rest(ranks) * (model.transformers - 1)
        # Either denoises or encodes; the other rests.
        held["fsdp"][ranks] = giga * max(
            resting + transformer.fsdp(ranks) + encoder.at_rest(ranks),
            resting + transformer.at_rest(ranks) + encoder.fsdp(ranks),
        )
        # Text encoders by FSDP2 over the same ranks.
        held["tensor"][ranks] = giga * (transformer.tensor_parallel(ranks) * model.transformers + encoder.fsdp(ranks))
        share = (ranks - 1) / ranks
        sent["fsdp"][ranks] = giga * model.calls * share * transformer.sharded
        sent["tensor"][ranks] = giga * model.calls * 2 * share * transformer.reduced * model.tokens
    return {
        "one copy": one_copy,
        "transformer, billions": transformer.total / 1e9,
        "text encoder, billions": encoder.total / 1e9,
        "held": held,
        "received per step": sent,
    }


def fits(held: float) -> str:
    return next((str(card) for card in CARDS if held + RESERVED_GB <= card), "none")


def held_table(models: dict[str, dict[str, Any]]) -> list[str]:
    """Return gigabytes of weights on a rank, and the smallest card for them, replicated and by fsdp."""
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


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/which_option.md and docs/weights.md."""
    machines, models = read_results("machines"), read_results("weights_memory")["gigabytes"]
    return {
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
    rows = {name: row(model) for name, model in SHARDED.items()}
    print(write_results("weights_memory", {"gigabytes": rows}, "diffusers", "transformers"))


if __name__ == "__main__":
    main()
