"""Under torchrun, on hosts whose links are shaped one way after the other: latency and bandwidth of the link, seconds of a call.

The program that made the hosts shapes the links when the first rank asks for it: a file for each question and each answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import parser_of
from benchmarks.pipelines.generation import PIPELINES
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

SIZES = {
    "flux": {"height": 256, "width": 256, "max_sequence_length": 13},
    "wan": {"height": 128, "width": 160, "num_frames": 17, "max_sequence_length": 13},
}
_LARGE = 1 << 20  # bytes to each rank on another host
_ROUNDS = 5


class LinkCounter(TorchDispatchMode):
    """Inside, counts the collectives of this rank that cross the link of its host, and the bytes that it sends over it."""

    def __init__(self, hosts: Sequence[int]) -> None:
        super().__init__()
        self.hosts, self.exchanges, self.bytes = hosts, 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = _collective(function, args)
        if found is not None:
            group, sent = found
            mine = self.hosts[dist.get_rank()]
            crossing = [
                sent[i] for i, rank in enumerate(dist.get_process_group_ranks(group)) if self.hosts[rank] != mine
            ]
            self.exchanges += bool(crossing)
            self.bytes += sum(crossing)
        return function(*args, **(kwargs or {}))


def _collective(function: Any, args: Sequence[Any]) -> tuple[dist.ProcessGroup, list[int]] | None:
    """The group of a collective, and the bytes that it sends to each of its ranks; None if it is none."""
    if function is torch.ops.c10d.alltoall_base_.default:
        _, x, boxed, _, sizes, *_ = args
        group = dist.ProcessGroup.unbox(boxed)
        return group, _bytes_to_each(x, sizes or [len(x) // group.size()] * group.size())
    if function is torch.ops.para_core.all_to_all.default:
        return _named(args[3]), _bytes_to_each(args[0], args[1])
    if function is torch.ops.c10d._allgather_base_.default:
        group = dist.ProcessGroup.unbox(args[2])
        return group, [args[1].nbytes] * group.size()
    if function is torch.ops.para_core.all_gather.default:
        return _named(args[2]), [args[0].nbytes] * len(args[1])
    return None


def _named(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _bytes_to_each(x: Tensor, sizes: Sequence[int]) -> list[int]:
    return [size * x.element_size() * (x.numel() // max(1, len(x))) for size in sizes]


def seconds(run: Callable[[], Any], rounds: int = _ROUNDS) -> float:
    """Of the slowest rank, the median of ``rounds``."""
    run()
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        run()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return median(found)


def exchange(num_bytes: int, group: dist.ProcessGroup) -> Callable[[], Any]:
    """An all-to-all of so many bytes to each rank of ``group``."""
    x = torch.zeros(num_bytes * dist.get_world_size(group), dtype=torch.uint8)
    received = torch.empty_like(x)
    return lambda: dist.all_to_all_single(received, x, group=group)


def measure(pipes: Mapping[str, Any], ring: dist.ProcessGroup) -> dict[str, Any]:
    """As the link is now: ``alpha``, seconds of an exchange of nothing; ``beta``, seconds of a byte; of each pipeline, of a call."""
    alpha = seconds(exchange(1, ring), 20)
    # All ranks of a host send at once, as in a call.
    beta = (seconds(exchange(_LARGE, ring)) - alpha) / (_LARGE * (dist.get_world_size(ring) - 1))
    calls = {name: seconds(lambda pipe=pipe, name=name: _call(pipe, name)) for name, pipe in pipes.items()}
    return {"alpha": alpha, "beta": beta, "seconds": calls}


def _call(pipe: Any, name: str) -> Any:
    return pipe(**PIPELINES[name].call(**SIZES[name]))


def _count(pipe: Any, name: str, hosts: Sequence[int]) -> dict[str, int]:
    with torch.no_grad(), LinkCounter(hosts) as counter:
        _call(pipe, name)
    return {"exchanges": counter.exchanges, "bytes": counter.bytes}


def _ask(folder: Path, number: int) -> None:
    """Have the links shaped in the way of this number."""
    if dist.get_rank() == 0:
        (folder / f"ask{number}").touch()
        while not (folder / f"done{number}").exists():
            time.sleep(0.01)
    dist.barrier()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where questions and answers are, and found.json")
    parser.add_argument("--shapes", type=int, required=True, help="how many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, int(os.environ["GROUP_RANK"]))
    mesh = init_context_parallel_mesh("cpu")
    pipes = {name: parallelize_pipe(PIPELINES[name].build(), mesh=mesh) for name in SIZES}
    counted = {name: _count(pipe, name, hosts) for name, pipe in pipes.items()}
    found = []
    for number in range(args.shapes):
        _ask(args.folder, number)
        found.append(measure(pipes, mesh.get_group("ring")))
    if dist.get_rank() == 0:
        (args.folder / "found.json").write_text(json.dumps({"counted": counted, "measured": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
