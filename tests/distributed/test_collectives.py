"""Gathering parts of unequal sizes, on gloo and on a group that pretends to be NCCL."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import guided_mesh

SIZES = [(3, 1), (0, 4), (2, 0), (5, 6), (2, 2)]


def part_of(rank, sizes, dim, dtype):
    shape = [4, 2, 3]
    shape[dim] = sizes[rank]
    values = torch.arange(24 * sum(sizes), dtype=torch.float64)[: torch.Size(shape).numel()].view(shape)
    part = (values + 100 * rank).to(dtype)
    return part.mT.contiguous().mT  # The part is not contiguous.


class FakeNccl:
    """Stand-ins for the calls that NCCL supports, carried out by gloo. They require what
    ``ProcessGroupNCCL::allgather`` requires.
    """

    def __init__(self):
        self.gathers, self.broadcasts, self.broadcast = 0, 0, dist.broadcast

    def backend_of(self, *_):
        return SimpleNamespace(name=lambda: "nccl")

    def count_broadcast(self, *args, **kwargs):
        self.broadcasts += 1
        return self.broadcast(*args, **kwargs)

    def all_gather(self, outputs, x, group=None, async_op=False):
        self.gathers += 1
        assert len(outputs) == group.size()
        assert all(out.is_contiguous() and out.dtype == x.dtype for out in (*outputs, x))
        assert outputs[group.rank()].shape == x.shape
        for rank, out in enumerate(outputs):
            if rank == group.rank():
                out.copy_(x)
            if out.numel():
                self.broadcast(out, group_src=rank, group=group)

    def __enter__(self):
        self.stack = ExitStack()
        self.stack.enter_context(mock.patch.object(dist.ProcessGroup, "_get_backend", self.backend_of))
        self.stack.enter_context(mock.patch.object(dist, "all_gather", self.all_gather))
        self.stack.enter_context(mock.patch.object(dist, "broadcast", self.count_broadcast))
        return self

    def __exit__(self, *_):
        self.stack.close()


def gathered_on(nccl, cases):
    """Return ``(gathered, gathers, broadcasts)`` for each case."""
    dim = next(dim for dim in guided_mesh(dist.group.WORLD).dims if dim.size == 2)
    results = []
    for sizes, tensor_dim, dtype in cases:
        x = part_of(dist.get_rank(), sizes, tensor_dim, dtype)
        with FakeNccl() if nccl else ExitStack() as counts:
            out = all_gather(x, sizes, tensor_dim, dim)
        results.append((out, counts.gathers, counts.broadcasts) if nccl else (out, None, None))
    return results


CASES = [(sizes, tensor_dim, torch.float32) for sizes in SIZES for tensor_dim in (0, 1, 2)]
CASES += [(SIZES[0], 1, dtype) for dtype in (torch.bool, torch.bfloat16, torch.int64)]


@pytest.mark.parametrize("nccl", [False, True])
def test_uneven_parts_are_gathered_by_one_collective_on_nccl(rank_pool, nccl):
    for results in rank_pool.run(gathered_on, 2, nccl, CASES):
        for (sizes, tensor_dim, dtype), (out, gathers, broadcasts) in zip(CASES, results, strict=True):
            expected = torch.cat([part_of(rank, sizes, tensor_dim, dtype) for rank in range(2)], tensor_dim)
            assert torch.equal(out, expected), (sizes, tensor_dim, dtype)
            if nccl:
                uneven = sizes[0] != sizes[1]
                assert (gathers, broadcasts) == (int(uneven), 0), (sizes, tensor_dim, dtype)


def compiled_and_gradient(nccl):
    dim = next(dim for dim in guided_mesh(dist.group.WORLD).dims if dim.size == 2)
    rank, sizes = dist.get_rank(), (3, 1)
    weight = torch.arange(1.0, 25.0).view(4, 2, 3)

    def weighted(x):
        return (all_gather(x, sizes, 0, dim) * weight).sum() * (rank + 1)

    compiled = torch.compile(weighted, backend="aot_eager", fullgraph=True)
    x = part_of(rank, sizes, 0, torch.float32).requires_grad_()
    with FakeNccl() if nccl else ExitStack() as counts:
        out = compiled(x)
        if nccl:
            assert (counts.gathers, counts.broadcasts) == (1, 0)
    out.backward()
    return out.detach(), x.grad


@pytest.mark.sample(1)
@pytest.mark.parametrize("nccl", [False, True])
def test_uneven_parts_gather_in_one_graph_with_gradient(rank_pool, nccl):
    whole = torch.cat([part_of(rank, (3, 1), 0, torch.float32) for rank in range(2)])
    weight = torch.arange(1.0, 25.0).view(4, 2, 3)
    # The sum of each rank has its own factor, and the gradients of both ranks are added.
    gradients = (3 * weight).split((3, 1))
    for rank, (out, gradient) in enumerate(rank_pool.run(compiled_and_gradient, 2, nccl)):
        torch.testing.assert_close(out, (whole * weight).sum() * (rank + 1))
        torch.testing.assert_close(gradient, gradients[rank])
