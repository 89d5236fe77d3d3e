"""What the exchange before each intercepted call costs in eager code:  python -m benchmarks.agreement_cost

Small attention calls on two ranks, with and without ``assume_equal=True``, in turns. Prints the median difference and
writes benchmarks/results/agreement_cost.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.environment import write_results
from benchmarks.launch import launch
from para_core import init_context_parallel_mesh, unified_attention


def measure(calls: int) -> dict[str, float]:
    """Median microseconds of one call, with the exchange and without; for one rank process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_context_parallel_mesh("cpu")
    query = torch.randn(1, 2, 64, 32)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for call in range(2 * calls):
        assume_equal = call % 2 == 0
        start = time.perf_counter()
        unified_attention(query, query, query, mesh=mesh, assume_equal=assume_equal)
        seconds[assume_equal].append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    with_exchange, without = (1e6 * statistics.median(seconds[assume_equal]) for assume_equal in (False, True))
    return {"with": with_exchange, "without": without, "exchange": with_exchange - without}


def main() -> None:
    """Start the two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank_process:
        launch("benchmarks.agreement_cost", 2, "--rank-process", "--calls", str(options.calls))
        return
    microseconds = {name: round(value) for name, value in measure(options.calls).items()}
    if int(os.environ["RANK"]) == 0:
        print(f"microseconds per attention call: {microseconds}")
        print(write_results("agreement_cost", {"microseconds per call": microseconds, "backend": "gloo, 2 ranks"}))


if __name__ == "__main__":
    main()
