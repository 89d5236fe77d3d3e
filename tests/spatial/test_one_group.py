"""The groups over which rows are distributed."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters import parallelize_vae
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot
from para_core.spatial.mode import dim_groups, first_ranks, one_group
from zoo.tiny.vaes import TINY_VAES


def row_groups(ranks):
    """Return, for each number of first ranks of a ring × Ulysses mesh of ``ranks``, the group's ranks and the mesh dim
    whose group it is, on this rank.
    """
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("ring", "ulysses"))
    vae = parallelize_vae(TINY_VAES["KL"].make(), mesh=mesh)
    run = slot_owner(vae, Slot.PARALLEL_VAE, object)
    names = {id(mesh.get_group(name)): name for name in ("ring", "ulysses")}
    results = {}
    for count in (2, 3):
        group = run.row_ranks.first(count).group
        if group is not None:
            total = torch.tensor(10.0 ** dist.get_rank())
            dist.all_reduce(total, group=group)
            results[count] = (dist.get_process_group_ranks(group), total.item(), names.get(id(group)))
    return results


@pytest.mark.parametrize(("ranks", "name"), [([[0, 1], [2, 3]], "ulysses"), ([[0, 2], [1, 3]], "ring")])
def test_first_ranks_use_group_of_equal_mesh_dim(rank_pool, ranks, name):
    two, three = ([0, 1], 11.0, name), ([0, 1, 2], 111.0, None)
    assert rank_pool.run(row_groups, 4, ranks) == [{2: two, 3: three}, {2: two, 3: three}, {3: three}, {}]


def group_of_another_order():
    """Check a group of the same ranks in another order. It is no substitute, because rows are in the order of the
    ranks.
    """
    world = dist.group.WORLD
    backward = dist.new_group([1, 0], sort_ranks=False)
    first = first_ranks([0, 1], 2, like=world, groups=[backward])
    return first.index, first.group is backward, dim_groups(world) == [world], one_group(world).group is world


def test_group_in_another_order_is_not_used(rank_pool):
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("new_group of this torch has no sort_ranks")
    assert rank_pool.run(group_of_another_order, 2) == [(0, False, True, True), (1, False, True, True)]
