"""How far sharded weights are from one device, and how many bytes of weights a rank holds, by model, mesh and method:

    python -m benchmarks.pipelines.weights

One call of tiny transformers with random weights and four heads (`zoo.tiny.transformers.registry`), in float32, on 2 and 4 ranks. fsdp is compared
with the same mesh on replicated weights, bit by bit; tensor with one device. Cached: a second, similar call, the blocks of which are
skipped. Compiled: `aot_eager`, each block (fsdp; tensor where the model alone has no whole graph) or the whole transformer (tensor) in
one graph. Fills its parts of docs/weights.md, and
writes benchmarks/results/weights_table.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.environment import RESULTS, write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.page_parts import fill
from para_core import reset_cache
from para_core.adapters import apply_cache_on_transformer, parallelize_transformer
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.components import blocks_of
from para_core.distributed.mesh import guided_mesh
from para_core.instance_patching import original_class
from para_core.weights.fsdp import shard_blocks
from para_core.weights.group import sequence_ranks, weights_mesh
from para_core.weights.tensor import shard_tensors
from zoo.tiny.transformers.registry import MODELS, NO_WHOLE_GRAPH

RESULT = RESULTS / "weights_table.json"
PAGE = Path(__file__).parents[2] / "docs/weights.md"
NAMES = {
    "FLUX": "flux",
    "Wan": "wan",
    "HunyuanVideo": "hunyuan",
    "Qwen-Image": "qwen-image",
    "CogVideoX": "cogvideox, rotary",
    "LTX-Video": "ltx",
    "Z-Image": "z-image",
    "Mochi": "mochi",
}
# So that four ranks can share heads and hidden units.
CONFIGS = {
    "ltx": {"num_attention_heads": 4, "cross_attention_dim": 32},
    "z-image": {"n_heads": 4, "n_kv_heads": 4, "dim": 96, "axes_dims": (8, 8, 8)},
    "mochi": {"num_attention_heads": 12, "attention_head_dim": 8, "pooled_projection_dim": 24},
}
SIZE = (3, 6, 10)
# (batch, ring, ulysses, tensor) by method and heading, for so many ranks. Of fsdp's "alone" each rank computes everything.
CELLS = {
    2: {
        ("fsdp", "alone"): (1, 1, 2, 1),
        ("fsdp", "Ulysses"): (1, 1, 2, 1),
        ("fsdp", "ring"): (1, 2, 1, 1),
        ("fsdp", "cache"): (1, 1, 2, 1),
        ("fsdp", "compiled"): (1, 1, 2, 1),
        ("tensor", "alone"): (1, 1, 1, 2),
        ("tensor", "cache"): (1, 1, 1, 2),
        ("tensor", "compiled"): (1, 1, 1, 2),
    },
    4: {
        ("fsdp", "alone"): (1, 1, 4, 1),
        ("fsdp", "Ulysses"): (1, 1, 4, 1),
        ("fsdp", "ring"): (1, 2, 2, 1),
        ("fsdp", "batch"): (2, 1, 2, 1),
        ("fsdp", "cache"): (1, 1, 4, 1),
        ("fsdp", "compiled"): (1, 2, 2, 1),
        ("tensor", "alone"): (1, 1, 1, 4),
        ("tensor", "Ulysses"): (1, 1, 2, 2),
        ("tensor", "ring"): (1, 2, 1, 2),
        ("tensor", "batch"): (2, 1, 1, 2),
        ("tensor", "cache"): (1, 1, 2, 2),
        ("tensor", "compiled"): (1, 1, 2, 2),
    },
}
HEADINGS = ("alone", "Ulysses", "ring", "batch", "cache", "compiled")

# Of the models whose bytes are counted: with two blocks of a kind, as elsewhere here, both would be gathered at once.
BLOCKS = 12


def build(name: str, **config: Any) -> nn.Module:
    model = MODELS[name]
    heads = CONFIGS.get(name, {"num_attention_heads": 4})
    return replace(model, config={**model.config, **heads, **config}).build()


def call(transformer: Any, name: str, change: float = 0.0) -> Tensor:
    inputs = MODELS[name].inputs(*SIZE)
    # Z-Image takes a list of samples.
    latents = "hidden_states" if "hidden_states" in inputs else "x"
    inputs[latents] = tree_map(lambda x: x * (1 + change), inputs[latents])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: Tensor = tree_leaves(transformer(**inputs, return_dict=False))[0]
    return out


def result(transformer: Any, name: str, heading: str) -> Tensor:
    if heading != "cache":
        return call(transformer, name)
    apply_cache_on_transformer(transformer, residual_diff_threshold=10.0)
    reset_cache(transformer)
    call(transformer, name)
    return call(transformer, name, 0.01)


def is_whole(transformer: nn.Module, method: str) -> bool:
    """Whether it is compiled as one graph, not block by block."""
    return method == "tensor" and original_class(transformer).__name__ not in NO_WHOLE_GRAPH


def compiled(transformer: Any, method: str) -> Any:
    if is_whole(transformer, method):
        return torch.compile(transformer, backend="aot_eager", fullgraph=True)
    for block in blocks_of(transformer):
        # As compile_repeated_blocks, which CogVideoX and Mochi do not have.
        block.compile(backend="aot_eager", fullgraph=True)
    return transformer


def held(transformer: nn.Module) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in transformer.parameters())


def shard(transformer: nn.Module, method: str, mesh: DeviceMesh) -> None:
    if method == "tensor":
        plan = tensor_plan_for(transformer)
        assert plan is not None
        shard_tensors(transformer, plan, mesh["tensor"])
    else:
        ranks = sequence_ranks(guided_mesh(mesh).sequence)
        shard_blocks(transformer, blocks_of(transformer), weights_mesh(ranks, "cpu"))


def bytes_of(name: str, method: str, mesh: DeviceMesh) -> dict[str, int]:
    """On the rank that holds most, between calls and at most during one, of a model of more blocks."""
    single, layers = "num_single_layers" in MODELS[name].config, "n_layers" if name == "z-image" else "num_layers"
    transformer = build(name, **{layers: BLOCKS}, **({"num_single_layers": BLOCKS} if single else {}))
    whole = held(transformer)
    blocks = [sum(x.nbytes for x in block.parameters()) for block in blocks_of(transformer)]
    shard(transformer, method, mesh)
    at_rest = torch.tensor(held(transformer))
    dist.all_reduce(at_rest, op=dist.ReduceOp.MAX)
    # fsdp: a block computes, and the next one is gathered.
    gathered = max(map(sum, pairwise(blocks))) if method == "fsdp" else 0
    return {"whole": whole, "at rest": int(at_rest), "at most": int(at_rest) + gathered}


def measure(name: str, method: str, heading: str, mesh: DeviceMesh) -> dict[str, Any]:
    """The error of the worst rank."""
    torch._dynamo.reset()
    whole, sharded = build(name), build(name)
    if heading != "alone" and method == "fsdp":
        parallelize_transformer(whole, mesh=mesh)
    expected = result(whole, name, heading)
    shard(sharded, method, mesh)
    if heading != "alone" or method == "tensor":
        parallelize_transformer(sharded, mesh=mesh)
    whole_graph = heading == "compiled" and is_whole(sharded, method)
    out = result(compiled(sharded, method) if heading == "compiled" else sharded, name, heading)
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    errors = torch.tensor(error, dtype=torch.float64)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return {"error": errors.item(), "same bits": errors.item() == 0, "whole graph": whole_graph}


def measure_on_these_ranks(titles: list[str]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for title in titles:
        name = NAMES[title]
        for (method, heading), shape in CELLS[dist.get_world_size()].items():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses", "tensor"))
            if heading == "alone":
                rows.setdefault(title, {})[f"{method}, bytes"] = bytes_of(name, method, mesh)
            rows.setdefault(title, {})[f"{method}, {heading}"] = measure(name, method, heading, mesh)
            if dist.get_rank() == 0:
                print(title, method, heading, rows[title][f"{method}, {heading}"], flush=True)
    return rows


def exactness_table(found: dict[int, dict[str, Any]]) -> list[str]:
    lines = [
        "| model | ranks | method | " + " | ".join(HEADINGS) + " |",
        "| --- | --- | --- |" + " --- |" * len(HEADINGS),
    ]
    for title in NAMES:
        for ranks, rows in found.items():
            if title not in rows:
                continue
            for method in ("fsdp", "tensor"):
                cells = [rows[title].get(f"{method}, {heading}") for heading in HEADINGS]
                texts = ["–" if x is None else "same bits" if x["same bits"] else f"{x['error']:.0e}" for x in cells]
                if method == "tensor" and cells[-1] and not cells[-1].get("whole graph", True):
                    texts[-1] += ", blocks"
                lines.append(f"| {title} | {ranks} | {method} | " + " | ".join(texts) + " |")
    return lines


def bytes_table(found: dict[int, dict[str, Any]]) -> list[str]:
    lines = [
        "| model | ranks | replicate | fsdp, between calls | fsdp, at most | tensor |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    for title in NAMES:
        for ranks, rows in found.items():
            if title not in rows:
                continue
            fsdp, tensor = rows[title]["fsdp, bytes"], rows[title]["tensor, bytes"]
            sizes = (fsdp["whole"], fsdp["at rest"], fsdp["at most"], tensor["at most"])
            lines.append(f"| {title} | {ranks} | " + " | ".join(f"{size:,}" for size in sizes) + " |")
    return lines


def main() -> None:
    """Measure on 2 and on 4 ranks, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", choices=tuple(CELLS), default=tuple(CELLS))
    parser.add_argument(
        "--models", nargs="*", choices=tuple(NAMES), default=tuple(NAMES), help="the others stay as they are"
    )
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        write_part(options.part, lambda: measure_on_these_ranks(options.models))
        return
    for ranks in options.ranks:
        for title in options.models:
            row = measured_on_ranks("benchmarks.pipelines.weights", ranks, "--models", title)
            # Read anew: each model is kept as soon as it is measured.
            known = json.loads(RESULT.read_text())["by ranks"] if RESULT.exists() else {}
            found = {number: {**known.get(str(number), {}), **(row if number == ranks else {})} for number in CELLS}
            write_results("weights_table", {"by ranks": found}, "diffusers")
    found = {int(number): rows for number, rows in json.loads(RESULT.read_text())["by ranks"].items()}
    parts = {"exactness": exactness_table(found), "bytes": bytes_table(found)}
    PAGE.write_text(fill(PAGE.read_text(), parts))
    print("\n".join([*parts["exactness"], "", *parts["bytes"]]))
    cells = [
        (ranks, title, cell, x)
        for ranks, rows in found.items()
        for title, row in rows.items()
        for cell, x in row.items()
    ]
    wrong = [
        (ranks, title, cell) for ranks, title, cell, x in cells if x.get("error", 0) > (1e-5 if "tensor" in cell else 0)
    ]
    if wrong:
        sys.exit(f"not as exact as docs/weights.md says: {wrong}")


if __name__ == "__main__":
    main()
