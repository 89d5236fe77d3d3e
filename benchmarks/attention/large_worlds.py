"""Host cost and compile time of one rank in worlds of 8, 64 and 512 ranks:  python -m benchmarks.attention.large_worlds

One process is rank 0 with PyTorch's fake backend. For each method it measures the seconds of its CPU until forward and
backward of a transformer are one graph each. For one attention call in eager code it counts the functions that Python
calls to plan it once, and in every later call. The counts are exact on every machine, and the milliseconds next to them
are not. Writes benchmarks/results/far_worlds.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness import calls_in_python, fake_group, parser_of, write_results
from para_core import UnifiedAttnMode

TOKENS_PER_RANK = 4
LAYERS = 4
# Each method has ring and Ulysses ranks of a world, and options of the mode.
METHODS: Mapping[str, tuple[Callable[[int], tuple[int, int]], dict[str, Any]]] = {
    "Ulysses": (lambda world: (1, world), {}),
    "ring": (lambda world: (world, 1), {}),
    "ring, gathered": (lambda world: (world, 1), {"rotate_method": "allgather"}),
    "ring, 2-D": (lambda world: (world, 1), {"rotate_method": "2d"}),
    "ring × 8": (lambda world: (world // 8, 8), {}),
    "ring × 8, 2-D": (lambda world: (world // 8, 8), {"rotate_method": "2d"}),
}


def trace(mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds until a compiled model has run forward and backward once, and the number of graphs."""
    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(32, 8, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    @torch.compile(fullgraph=True, backend=keep)
    def run(x: torch.Tensor) -> torch.Tensor:
        with UnifiedAttnMode(mesh, **options) as cp:
            tokens = cp.sequence(x.shape[1])
            return cp.gather(model(cp.shard(x, dim=1, sequence=tokens)), dim=1, sequence=tokens)

    x = torch.randn(1, mesh.size() * TOKENS_PER_RANK - 3, 32)
    start = time.process_time()
    run(x).sum().backward()
    return {"trace s": round(time.process_time() - start, 2), "graphs": len(graphs)}


def call(mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Return the number of Python calls, and milliseconds, to plan an attention call and of each later call."""
    qkv = [torch.randn(1, 8, TOKENS_PER_RANK, 4) for _ in range(3)]

    def attend() -> None:
        F.scaled_dot_product_attention(*qkv)

    costs = []
    for measure in (calls_in_python, _milliseconds):
        # Use a new mode, because a mode keeps its plans.
        with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True, **options) as cp:
            cp.sequence(mesh.size() * TOKENS_PER_RANK)
            first = measure(attend)
            later = min(measure(attend) for _ in range(5))
            costs.append((round(first - later, 2), round(later, 2)))
    (plan_calls, calls), (plan_ms, ms) = costs
    return {"plan, functions": plan_calls, "plan ms": plan_ms, "call, functions": calls, "call ms": ms}


def _milliseconds(way: Callable[[], None]) -> float:
    start = time.process_time()
    way()
    return 1e3 * (time.process_time() - start)


def main(arguments: list[str] | None = None) -> None:
    """Measure every world, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument(
        "--trace", nargs="+", default=list(METHODS), metavar="METHOD", help="of these methods a graph, too"
    )
    parser.add_argument("--no-record", action="store_true", help="write no file")
    args = parser.parse_args(arguments)
    costs = [cost for world in args.worlds for cost in in_world(world, list(METHODS), call)]
    # torch does this once per process, so it should not count for any world.
    torch.compile(nn.Linear(4, 4), backend="aot_eager")(torch.randn(2, 4)).sum().backward()
    traces = [cost for world in args.worlds for cost in in_world(world, args.trace, trace)]
    if not args.no_record:
        write_results("far_worlds", {"layers": LAYERS, "calls": costs, "traces": traces})


def in_world(
    world: int, methods: Sequence[str], measure: Callable[[DeviceMesh, dict[str, Any]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield and print ``measure(mesh, options)`` for each method on ``world`` ranks."""
    with fake_group(world):
        for method in methods:
            shape_of, options = METHODS[method]
            ring, ulysses = shape_of(world)
            mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
            cost = measure(mesh, options)
            print(f"{world} ranks, {method} (ring {ring} × ulysses {ulysses}): {cost}", flush=True)
            yield {"world": world, "method": method, "ring": ring, "ulysses": ulysses, **cost}


if __name__ == "__main__":
    main()
