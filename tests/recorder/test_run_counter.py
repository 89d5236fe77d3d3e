"""Bytes that a rank sends in each collective, by formulas worked out by hand."""

import pytest
import torch
import torch.distributed as dist

from para_core.recorder.run_counter import RunCounter

N = 12  # This is the number of float32 elements of a rank's tensor, which 2 and 4 divide.


def bytes_by_collective():
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    functional = torch.ops._c10d_functional  # Compiled graphs use these operators.
    x, wide = torch.ones(N), torch.ones(N * ranks)
    calls = {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_gather": lambda: dist.all_gather([torch.empty(N) for _ in range(ranks)], x),
        "all_to_all_single": lambda: dist.all_to_all_single(x.clone(), x),
        "broadcast": lambda: dist.broadcast(x.clone(), src=0),
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group),
        "functional all_gather": lambda: functional.all_gather_into_tensor(x, ranks, group),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(wide, "sum", ranks, group),
    }
    sent = {}
    for name, call in calls.items():
        with RunCounter() as counter:
            out = call()
        if name.startswith("functional"):
            functional.wait_tensor(out)
        assert counter.collectives == 1, name
        sent[name] = counter.bytes_sent
    return sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_each_collective(rank_pool, ranks):
    size = 4 * N
    gathered, reduced = size * (ranks - 1), 2 * size * (ranks - 1) // ranks
    expected = {
        "all_reduce": reduced,
        "all_gather": gathered,
        "all_to_all_single": size * (ranks - 1) // ranks,
        "broadcast": size,
        "functional all_reduce": reduced,
        "functional all_gather": gathered,
        "functional reduce_scatter": gathered,
    }
    for sent in rank_pool.run(bytes_by_collective, ranks):
        assert sent == expected
