"""How much of what travels does so while something is computed:  python -m benchmarks.overlap

One attention call on a ring of two ranks, one with Ulysses and chunks of heads, under PyTorch's profiler. Writes a trace of rank
0 for each (open it in a trace viewer, ui.perfetto.dev for one) and benchmarks/results/overlap.json.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.profiler import profile

from benchmarks.environment import write_results
from benchmarks.launch import launch
from para_core import UnifiedAttnMode

RANKS = 2
COMPUTE = "aten::_scaled_dot_product_flash_attention_for_cpu"
TRAVEL = "gloo:all_to_all"
Interval = tuple[float, float]

CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ring": (RANKS, 1, {}),
    "ulysses": (1, RANKS, {}),
    "ulysses, 4 chunks": (1, RANKS, {"ulysses_chunks": 4}),
}


def overlapped(travel: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """Microseconds of ``travel`` during which one of ``compute`` runs; intervals of each kind do not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in travel for b in compute)


def measure(name: str, tokens: int, folder: Path) -> dict[str, float]:
    """Milliseconds of both kinds in one call on this rank, and the overlapped share of what travels."""
    ring, ulysses, options = CALLS[name]
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [torch.randn(1, 8, tokens // RANKS, 64) for _ in range(3)]
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True, **options):
        F.scaled_dot_product_attention(*qkv)
        dist.barrier()
        with profile() as profiler:
            F.scaled_dot_product_attention(*qkv)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"))
    events = profiler.events()
    spans = {
        kind: [(event.time_range.start, event.time_range.end) for event in events if event.name == kind]
        for kind in (TRAVEL, COMPUTE)
    }
    total = {kind: sum(end - start for start, end in found) for kind, found in spans.items()}
    return {
        "travelling ms": round(total[TRAVEL] / 1e3, 2),
        "computing ms": round(total[COMPUTE] / 1e3, 2),
        "overlapped": round(overlapped(spans[TRAVEL], spans[COMPUTE]) / total[TRAVEL], 3),
    }


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="folder, made if it is missing")
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.rank_process:
        args.traces.mkdir(parents=True, exist_ok=True)
        arguments = ("--tokens", str(args.tokens), "--traces", str(args.traces))
        launch("benchmarks.overlap", RANKS, "--rank-process", *arguments)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: measure(name, args.tokens, args.traces) for name in CALLS}
    if int(os.environ["RANK"]) == 0:
        for name, row in found.items():
            print(f"{name}: {row}")
        print(write_results("overlap", {"ranks": RANKS, "tokens": args.tokens, "backend": "gloo", "calls": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
