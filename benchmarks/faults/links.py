"""Seconds of a generation over links of several speeds, beside what latency and bandwidth predict.

    python -m benchmarks.faults.links

Two hosts of two ranks (network namespaces: Linux, root), ring between the hosts and Ulysses inside. Of each shape of
the link are measured alpha, the seconds of an exchange of one byte between the hosts, and beta, the seconds of each
further byte that a rank sends. A call makes n exchanges over the link and sends m bytes per rank, both counted.
Predicted is

    seconds over the unshaped link + n × (alpha − alpha unshaped) + m × (beta − beta unshaped)

which takes no exchange for hidden behind computing. The unshaped link is measured before each shape, for others may use
the machine, too. Writes benchmarks/results/nodes.json (docs/several_nodes.md).
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.faults.hosts import Hosts, open_hosts, torchrun
from benchmarks.harness import parser_of, write_results
from benchmarks.pipelines.generation import PIPELINES
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe

# -- on the ranks, under torchrun


SIZES = {
    "flux": {"height": 256, "width": 256, "max_sequence_length": 13},
    "wan": {"height": 128, "width": 160, "num_frames": 17, "max_sequence_length": 13},
}
_LARGE = 1 << 20  # bytes to each rank on another host
_ROUNDS = 5


class LinkCounter(TorchDispatchMode):
    """A counter of the collectives of this rank that cross the link of its host, and of the bytes that it
    sends over it.
    """

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
    """Return the group of a collective, and the bytes that it sends to each of its ranks; None if it is none."""
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
    """Return the median over ``rounds`` of the slowest rank's seconds."""
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
    """Return a function that runs an all-to-all of so many bytes to each rank of ``group``."""
    x = torch.zeros(num_bytes * dist.get_world_size(group), dtype=torch.uint8)
    received = torch.empty_like(x)
    return lambda: dist.all_to_all_single(received, x, group=group)


def measure(pipes: Mapping[str, Any], ring: dist.ProcessGroup) -> dict[str, Any]:
    """Measure the link: ``alpha``, seconds of an empty exchange; ``beta``, seconds per byte; and the seconds of a call
    of each pipeline.
    """
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
    """Ask the main process to shape the links in the way of this number."""
    if dist.get_rank() == 0:
        (folder / f"ask{number}").touch()
        while not (folder / f"done{number}").exists():
            time.sleep(0.01)
    dist.barrier()


def measure_on_these_ranks(folder: Path) -> None:
    """Measure each shape of the links. Questions and answers are files in ``folder``, and so is the result,
    found.json.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, int(os.environ["GROUP_RANK"]))
    mesh = init_context_parallel_mesh("cpu")
    pipes = {name: parallelize_pipe(PIPELINES[name].build(), mesh=mesh) for name in SIZES}
    counted = {name: _count(pipe, name, hosts) for name, pipe in pipes.items()}
    found = []
    for number in range(2 * len(SHAPES)):
        _ask(folder, number)
        found.append(measure(pipes, mesh.get_group("ring")))
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps({"counted": counted, "measured": found}))
    dist.destroy_process_group()


# -- the program that makes the hosts


# Megabits per second of each link, one-way delay in seconds of the second host's.
SHAPES: dict[str, tuple[float | None, float]] = {
    "200 Mbit/s": (200.0, 0.0),
    "50 Mbit/s": (50.0, 0.0),
    "2 ms": (None, 0.002),
    "10 ms": (None, 0.010),
    "50 Mbit/s, 10 ms": (50.0, 0.010),
}
UNSHAPED = (None, 0.0)


def shape(hosts: Hosts, megabits: float | None, delay: float) -> None:
    for host in range(hosts.num_hosts):
        hosts.heal(host)
    hosts.limit(megabits)
    if delay > 0:
        hosts.disturb(1, delay=delay)


def _shape_when_asked(hosts: Hosts, folder: Path, stop: threading.Event) -> None:
    for number, how in enumerate(how for shaped in SHAPES.values() for how in (UNSHAPED, shaped)):
        while not (folder / f"ask{number}").exists():
            if stop.wait(0.01):
                return
        shape(hosts, *how)
        (folder / f"done{number}").touch()


def predicted(plain: dict[str, Any], shaped: dict[str, Any], counted: dict[str, int], name: str) -> float:
    """Return seconds of a call of pipeline ``name``."""
    latency = counted["exchanges"] * (shaped["alpha"] - plain["alpha"])
    return float(plain["seconds"][name] + latency + counted["bytes"] * (shaped["beta"] - plain["beta"]))


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    measured = found["measured"]
    return [
        {
            "link": label,
            "alpha": shaped["alpha"],
            "beta": shaped["beta"],
            "pipeline": name,
            **counted,
            "seconds unshaped": plain["seconds"][name],
            "seconds": shaped["seconds"][name],
            "predicted": predicted(plain, shaped, counted, name),
        }
        for label, plain, shaped in zip(SHAPES, measured[::2], measured[1::2], strict=True)
        for name, counted in found["counted"].items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-record", action="store_true", help="write no file")
    parser.add_argument("--folder", type=Path, help="(of the ranks) where the program that shapes the links is asked")
    args = parser.parse_args(arguments)
    if args.folder is not None:
        measure_on_these_ranks(args.folder)
        return
    stop = threading.Event()
    with open_hosts(2, namespaces=True) as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shaping = threading.Thread(target=_shape_when_asked, args=(hosts, folder, stop))
        shaping.start()
        try:
            torchrun(hosts, "benchmarks.faults.links", "--folder", name, seconds=1200)
        finally:
            stop.set()
            shaping.join()
        found = json.loads((folder / "found.json").read_text())
    rows = rows_of(found)
    print(json.dumps(rows, indent=2))
    if not args.no_record:
        print(write_results("nodes", {"rows": rows}, "diffusers"))


if __name__ == "__main__":
    main()
