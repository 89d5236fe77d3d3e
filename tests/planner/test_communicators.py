"""Memory of NCCL's communicators in a plan."""

import pytest

from para_core.planner.prediction import COMMUNICATOR, communicators, room_of
from para_core.planner.traffic import MeshShape
from tests.planner.test_cost import machine


def test_a_rank_has_less_room_for_each_communicator():
    counts = {
        MeshShape(): 0,
        MeshShape(ulysses=8): 1,
        MeshShape(ring=2, ulysses=4): 2,
        MeshShape(ulysses=2, fsdp=True): 2,
        MeshShape(pipe=4, ulysses=2): 6,
    }
    whole = room_of(machine(), MeshShape())
    assert {shape: round((whole - room_of(machine(), shape)) / COMMUNICATOR) for shape in counts} == counts


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_plan_counts_edges_of_largest_stage(num_stages):
    last = num_stages - 1
    edges = {*[(i, i + 1) for i in range(last)], *[(last, i) for i in range(last)]}
    most = max(sum(stage in edge for edge in edges) for stage in range(num_stages))
    assert communicators(MeshShape(pipe=num_stages, batch=2)) == 2 + most
