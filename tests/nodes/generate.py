"""The program of each host: its ranks write their images, and the hosts of the ranks of their mesh dims."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.pipelines.latents import PIPELINES
from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe


def hosts_of_dims(mesh):
    """Return, for each mesh dim with several ranks, the hosts of this rank's group in its order."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, int(os.environ["GROUP_RANK"]))
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    return {name: [hosts[rank] for rank in ranks] for name, ranks in groups.items() if len(ranks) > 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_context_parallel_mesh("cpu")
    images = {}
    for name in sys.argv[2:]:
        pipe = parallelize_pipe(PIPELINES[name].build(), mesh=mesh)
        images[name] = pipe(**PIPELINES[name].call(), return_dict=False)[0]
    torch.save({"dims": hosts_of_dims(mesh), "images": images}, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
