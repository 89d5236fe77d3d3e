"""The program that a user starts on each host: ``torchrun --nnodes=2 --nproc_per_node=2 … -m tests.nodes.generate flux
wan``

It generates one image of each named pipeline on all ranks, with the mesh that para_core chooses. Each rank writes its
result, and the hosts of the ranks of its mesh dims, to ``--output``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import parser_of
from benchmarks.pipelines.latents import PIPELINES
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe


def hosts_of_dims(mesh: Any) -> dict[str, list[int]]:
    """Return, for each mesh dim with several ranks, the hosts of this rank's group in its order."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, int(os.environ["GROUP_RANK"]))
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    return {name: [hosts[rank] for rank in ranks] for name, ranks in groups.items() if len(ranks) > 1}


def generate(name: str, mesh: Any, repeat: int) -> dict[str, Any]:
    """Return the last of ``repeat`` images and the seconds of each. The first one also opens connections."""
    tiny = PIPELINES[name]
    pipe = parallelize_pipe(tiny.build(), mesh=mesh)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        image = pipe(**tiny.call(), return_dict=False)[0]
        seconds.append(time.perf_counter() - start)
    return {"out": image, "seconds": seconds}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("pipelines", nargs="+", choices=sorted(PIPELINES))
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_context_parallel_mesh("cpu")
    images = {name: generate(name, mesh, args.repeat) for name in args.pipelines}
    torch.save({"dims": hosts_of_dims(mesh), "found": images}, args.output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
