"""Attention2D against plain SDPA in generated calls, and beside a ring and Ulysses:  python -m benchmarks.attention_2d

Two thousand calls of random sizes, layouts, masks and options on 4 and on 6 ranks, each compared with SDPA on one device. Then, on 4 ranks,
bytes and seconds of one call each way, forward and backward, in turns. Prints a table, writes benchmarks/results/attention_2d.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.environment import write_results
from benchmarks.generated_calls import count_kinds, draw, worst_error
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.traffic import TrafficCounter
from para_core import UnifiedAttnMode

# (ring, ulysses) and the share of the calls: 2 × 2, 3 × 2, and one column inside and outside of Ulysses.
MESHES: dict[int, dict[tuple[int, int], float]] = {
    4: {(4, 1): 0.9, (2, 2): 0.1},
    6: {(6, 1): 0.9, (3, 2): 0.05, (2, 3): 0.05},
}
HEADS, HEAD_DIM = 8, 64
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ring": (4, 1, {}),
    "ring, gathered": (4, 1, {"rotate_method": "allgather"}),
    "2-D, 2 × 2": (4, 1, {"rotate_method": "2d"}),
    "Ulysses": (1, 4, {}),
}


def check_calls(first: int, last: int) -> dict[str, Any]:
    """The calls of these numbers, compared with one device, on this rank and the others."""
    ranks, numbers = dist.get_world_size(), range(first, last)
    rows, begin = [], 0
    for (ring, ulysses), share in MESHES[ranks].items():
        mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        those = numbers[begin : begin + round(share * len(numbers))]
        begin += len(those)
        errors = {number: worst_error(draw(number), mesh, "2d") for number in those}
        inexact = [number for number, error in errors.items() if error > 1]
        worst = round(max(errors.values(), default=0.0), 3)
        rows.append({"ring": ring, "ulysses": ulysses, "calls": len(those), "worst": worst, "inexact": inexact})
    return {"meshes": rows, "kinds": count_kinds([draw(number) for number in numbers])}


def time_ways(tokens: int, rounds: int) -> dict[str, Any]:
    """Bytes that the mesh sends in one call, and seconds of it, forward and with its gradient."""
    calls = {}
    for name, (ring, ulysses, options) in WAYS.items():
        mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        calls[name] = UnifiedAttnMode(mesh, assume_equal=True, **options)
    qkv = [torch.randn(1, HEADS, tokens // 4, HEAD_DIM) for _ in range(3)]
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in WAYS}
    for number in range(rounds + 1):
        for name, mode in calls.items() if number % 2 else reversed(calls.items()):
            for kind, found in seconds[name].items():
                took = _seconds_of_call(mode, qkv, backward=kind == "both")
                if number:  # the first finds sizes
                    found.append(took)
    return {
        name: {
            **_traffic_of_call(calls[name], qkv),
            **{f"{kind} s": round(statistics.median(found), 4) for kind, found in seconds[name].items()},
        }
        for name in WAYS
    }


def _call(mode: UnifiedAttnMode, qkv: list[Tensor], *, backward: bool) -> None:
    inputs = [x.detach().requires_grad_(backward) for x in qkv]
    with mode, torch.set_grad_enabled(backward):
        out = F.scaled_dot_product_attention(*inputs)
    if backward:
        out.sum().backward()


def _seconds_of_call(mode: UnifiedAttnMode, qkv: list[Tensor], *, backward: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    _call(mode, qkv, backward=backward)
    dist.barrier()
    return time.perf_counter() - start


def _traffic_of_call(mode: UnifiedAttnMode, qkv: list[Tensor]) -> dict[str, int]:
    """Of all ranks, of the first rank's collectives."""
    found = {}
    for kind in ("forward", "both"):
        with TrafficCounter() as traffic:
            _call(mode, qkv, backward=kind == "both")
        sent = torch.tensor(traffic.bytes)
        dist.all_reduce(sent)
        found |= {f"{kind} bytes": int(sent), f"{kind} collectives": traffic.collectives}
    return found


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="half of them on 4 ranks, half on 6")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-record", action="store_true", help="write no file")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    half = args.calls // 2
    if args.part:
        torch.set_num_threads(1)
        write_part(args.part, lambda: _measure(half, args.tokens, args.rounds))
        return
    options = ("--calls", str(args.calls), "--tokens", str(args.tokens), "--rounds", str(args.rounds))
    found = {ranks: measured_on_ranks("benchmarks.attention_2d", ranks, *options) for ranks in MESHES}
    ways = found[4].pop("ways")
    for ranks, part in found.items():
        for row in part["meshes"]:
            print(f"{ranks} ranks: {row}")
        print(f"{ranks} ranks: {part['kinds']}")
    for name, row in ways.items():
        print(f"{name}: {row}")
    if not args.no_record:
        print(write_results("attention_2d", {"tokens": args.tokens, "calls": found, "4 ranks": ways}))


def _measure(half: int, tokens: int, rounds: int) -> dict[str, Any]:
    if dist.get_world_size() == 6:
        return check_calls(half, 2 * half)
    return {**check_calls(0, half), "ways": time_ways(tokens, rounds)}


if __name__ == "__main__":
    main()
