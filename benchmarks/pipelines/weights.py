"""Sharded weights compared with one device, by model, mesh and method.

A check of `benchmarks.pipelines.exactness`: one call of tiny transformers with four heads. fsdp is compared bit by bit
with the same mesh on replicated weights, and tensor with one device. *Cached* is a second, similar call whose blocks
are skipped. *Compiled* is `aot_eager` with a graph for each block (fsdp, and tensor if the unmodified model has no
whole graph) or for the whole transformer (tensor).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.harness import largest_over_ranks, read_results, relative_error
from para_core import reset_cache
from para_core.adapters import apply_cache_on_transformer, parallelize_transformer
from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.registry import tensor_plan_for
from para_core.distributed.mesh import guided_mesh
from para_core.instance.private_class import original_class
from para_core.weights.fsdp import shard_blocks
from para_core.weights.group import sequence_ranks, weights_mesh
from para_core.weights.tensor import shard_tensors
from zoo.tiny.transformers.registry import MODELS, NO_WHOLE_GRAPH

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
# With these sizes, four ranks can share heads and hidden units.
CONFIGS = {
    "ltx": {"num_attention_heads": 4, "cross_attention_dim": 128},
    "z-image": {"n_heads": 4, "n_kv_heads": 4, "dim": 96, "axes_dims": (8, 8, 8)},
    "mochi": {"num_attention_heads": 12, "attention_head_dim": 8, "pooled_projection_dim": 24},
}
SIZE = (3, 6, 10)
# Each method and heading has (batch, ring, ulysses, tensor) by number of ranks. With fsdp's "alone", each rank computes
# everything.
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


def build(name: str, **config: Any) -> nn.Module:
    heads = CONFIGS.get(name, {"num_attention_heads": 4})
    return MODELS[name].build(**heads, **config)


def call(transformer: Any, name: str, change: float = 0.0) -> Tensor:
    inputs = MODELS[name].inputs(*SIZE)
    # Z-Image takes a list of samples.
    latents = "hidden_states" if "hidden_states" in inputs else "x"
    inputs[latents] = tree_map(lambda x: x * (1 + change), inputs[latents])
    if change:
        # It is another step, so the timestep differs.
        clock = "timestep" if "timestep" in inputs else "t"
        inputs[clock] = inputs[clock] - inputs[clock].new_ones(())
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
    """Return whether the model is compiled as one graph, not by blocks."""
    return method == "tensor" and original_class(transformer).__name__ not in NO_WHOLE_GRAPH


def compiled(transformer: Any, method: str) -> Any:
    if is_whole(transformer, method):
        return torch.compile(transformer, backend="aot_eager", fullgraph=True)
    for block in blocks_of(transformer):
        # compile_repeated_blocks does this, but CogVideoX and Mochi do not have it.
        block.compile(backend="aot_eager", fullgraph=True)
    return transformer


def shard(transformer: nn.Module, method: str, mesh: DeviceMesh) -> None:
    if method == "tensor":
        plan = tensor_plan_for(transformer)
        assert plan is not None
        shard_tensors(transformer, plan, mesh["tensor"])
    else:
        ranks = sequence_ranks(guided_mesh(mesh).sequence)
        shard_blocks(transformer, blocks_of(transformer), weights_mesh(ranks, "cpu"))


def measure(titles: list[str]) -> dict[str, dict[str, Any]]:
    """Return the errors of models on meshes with this number of ranks."""
    rows: dict[str, dict[str, Any]] = {}
    for title in titles:
        name, row = NAMES[title], rows.setdefault(title, {})
        for (method, heading), shape in CELLS[dist.get_world_size()].items():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses", "tensor"))
            row[f"{method}, {heading}"] = measure_cell(name, method, heading, mesh)
    return rows


def measure_cell(name: str, method: str, heading: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the error of the worst rank."""
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
    error = largest_over_ranks(relative_error(out, expected))
    return {"error": error, "same bits": error == 0, "whole graph": whole_graph}


def problems(by_ranks: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return a line for each wrong cell: fsdp must have the same bits, and tensor an error below 1e-5."""
    return [
        f"sharded weights of {title} on {ranks} ranks, {cell}: error {x['error']:.1e}"
        for ranks, rows in by_ranks.items()
        for title, row in rows.items()
        for cell, x in row.items()
        if x.get("error", 0) > (1e-5 if "tensor" in cell else 0)
    ]


def parts() -> dict[str, list[str]]:
    """Return the lines of docs/weights.md on exactness. The JSON has the cell of each model."""
    lines = []
    for method in ("fsdp", "tensor"):
        cells = [
            row[f"{method}, {heading}"]
            for of_ranks in read_results("weights_table")["by ranks"].values()
            for row in of_ranks.values()
            for heading in HEADINGS
            if f"{method}, {heading}" in row
        ]
        worst, same = max(cell["error"] for cell in cells), sum(cell["same bits"] for cell in cells)
        result = f"the largest error is {worst:.0e}" if worst else f"{same} have the same bits"
        lines.append(f"- {method}: {len(cells)} cells ({', '.join(HEADINGS)}); {result}.")
    return {"exactness": lines}
