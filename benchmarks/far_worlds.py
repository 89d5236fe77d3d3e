"""How long it takes to trace a model for worlds of 8, 64 and 512 ranks:  python -m benchmarks.far_worlds

One process plays rank 0 with PyTorch's fake backend; forward and backward of a transformer become one graph each. Writes
benchmarks/results/far_worlds.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.environment import write_results
from para_core import UnifiedAttnMode

TOKENS_PER_RANK = 4
LAYERS = 4


def trace(ring: int, ulysses: int) -> dict[str, Any]:
    """Seconds until a compiled model has run forward and backward once, and the graphs that this took."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    layer = nn.TransformerEncoderLayer(32, 8, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    @torch.compile(fullgraph=True, backend=keep)
    def run(x: torch.Tensor) -> torch.Tensor:
        with UnifiedAttnMode(mesh) as cp:
            tokens = cp.sequence(x.shape[1])
            return cp.gather(model(cp.shard(x, dim=1, sequence=tokens)), dim=1, sequence=tokens)

    x = torch.randn(1, ring * ulysses * TOKENS_PER_RANK - 3, 32)
    start = time.perf_counter()
    run(x).sum().backward()
    seconds = time.perf_counter() - start
    return {"ring": ring, "ulysses": ulysses, "seconds": round(seconds, 2), "graphs": len(graphs)}


def main(arguments: list[str] | None = None) -> None:
    """Trace every world, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--no-record", action="store_true", help="write no file")
    args = parser.parse_args(arguments)
    rows = []
    trace_alone()
    for world in args.worlds:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        for ring, ulysses in ((1, world), (world, 1), (world // 8, 8)):
            rows.append(trace(ring, ulysses))
            print("ring {ring} × ulysses {ulysses}: {seconds} s, {graphs} graph(s)".format(**rows[-1]), flush=True)
        dist.destroy_process_group()
    if not args.no_record:
        write_results("far_worlds", {"layers": LAYERS, "worlds": rows})


def trace_alone() -> None:
    """Compile something first: what torch does once per process is not of any world."""
    torch.compile(nn.Linear(4, 4), backend="aot_eager")(torch.randn(2, 4)).sum().backward()


if __name__ == "__main__":
    main()
