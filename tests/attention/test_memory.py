"""The number of key and value blocks that a ring holds at once, and the copies that a gather makes."""

import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import UnifiedAttnMode
from tests.attention.one_device import make_qkv


class Buffers(TorchDispatchMode):
    """A recorder of the most collective buffers alive at once, sampled when attention is computed or a collective
    begins.
    """

    def __init__(self):
        super().__init__()
        self.alive, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.alltoall_base_.default:
            self.note(args[0], args[1])
        if func is torch.ops.c10d._allgather_base_.default:
            self.note(args[0])
        if "attention" in func.__name__:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self, *buffers):
        self.alive += [weakref.ref(x.untyped_storage()) for x in buffers if not self.knows(x.untyped_storage())]
        # gloo's thread frees the buffers of a finished collective shortly after the waiting rank continues.
        for _ in range(100):
            if self.count() <= 2:
                break
            time.sleep(0.01)
        self.most = max(self.most, self.count())

    def knows(self, storage):
        return any(reference() is storage for reference in self.alive)

    def count(self):
        return len({x.data_ptr() for reference in self.alive if (x := reference()) is not None and x.nbytes()})


def count_blocks(backward):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(4, dim=2)[mesh.get_rank()].clone().requires_grad_(backward) for x in make_qkv(16, 2)]
    with torch.set_grad_enabled(backward), UnifiedAttnMode(mesh, assume_equal=True), Buffers() as buffers:
        F.scaled_dot_product_attention(*qkv)
    return buffers.most


@pytest.mark.parametrize("backward", [False, True], ids=["no_grad", "grad"])
def test_rotating_ring_holds_two_more_blocks(rank_pool, backward):
    assert rank_pool.run(count_blocks, 4, backward) == [2] * 4


class Written(TorchDispatchMode):
    """A counter of the elements that were allocated or copied in addition to the result of a collective."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in {"cat", "clone", "copy_", "repeat", "stack", "contiguous"}:
            self.elements += out.numel()
        return out


def copy_to_gather():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("ring", "ulysses"))
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True) as cp:
        cp.intercepted = True
        part = cp.shard(torch.arange(2 * 16 * 3).view(2, 16, 3), dim=1)
        with Written() as written:
            whole = cp.gather(part, dim=1)
    return written.elements, part.numel(), whole


def test_gather_copies_part_and_whole_once(rank_pool):
    """Check that the whole is contiguous, because models view(-1, C) it. A single sample needs no copy for that."""
    for copied, part, whole in rank_pool.run(copy_to_gather, 4):
        assert copied <= part + whole.numel()
        assert torch.equal(whole, torch.arange(2 * 16 * 3).view(2, 16, 3))
