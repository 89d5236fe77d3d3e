"""Collectives, bytes, copies and buffers of an attention call, compared with the formulas in the docstrings."""

import time
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.distributed.agree import is_record
from tests.attention.cases import CAUSAL, cpu_mesh
from tests.attention.one_device import make_qkv
from tests.operators import Operators

B, H, D = 2, 5, 8
TEXT, IMAGE = ("text", 3, True), ("image", 13)


class Traffic(TorchDispatchMode):
    """A recorder of the bytes that this rank sends in all-to-alls and all-gathers, and of other collectives by name."""

    def __init__(self):
        super().__init__()
        self.sent, self.gathered, self.others = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.alltoall_base_.default:
            _, x, group, _, send_sizes, *_ = args
            group = dist.ProcessGroup.unbox(group)
            send_sizes = send_sizes or [len(x) // group.size()] * group.size()
            rows = [size for peer, size in enumerate(send_sizes) if peer != group.rank()]
            self.sent.append(sum(rows) * x[0].numel() * x.element_size() if len(x) else 0)
        elif func is torch.ops.c10d._allgather_base_.default and not is_record(args[0]):
            self.gathered.append(args[0].nbytes - args[1].nbytes)
        elif func.namespace in {"_c10d_functional", "c10d"} and "wait" not in func.__name__:
            self.others.append(func.__name__)
        return func(*args, **(kwargs or {}))


def sizes(total, ranks):
    return [len(part) for part in torch.arange(total).tensor_split(ranks)]


def of_ulysses(rank, ranks, num_text):
    tokens, heads = sizes(13, ranks), sizes(H, ranks)
    to_heads = B * 4 * D * tokens[rank] * (H - heads[rank])
    to_tokens = B * 4 * D * heads[rank] * (13 - tokens[rank] + num_text * (ranks - 1))
    return [3 * to_heads, to_tokens], [to_heads, 3 * to_tokens]


def of_ring(rank, ranks, num_text):
    def hops(steps):
        return [B * H * 2 * D * 4 * sizes(13, ranks)[(rank - step) % ranks] for step in steps]

    # At step i a rank passes on the block that started i ranks before it. A block that arrived at step i passes its
    # gradient on, from the first step in which it is not the rank's own. Replicated text does not travel.
    passed = hops(range(ranks - 1))
    return passed, passed + hops(range(1, ranks))


# (ring, ulysses), segments, options of the call, options of the mode, and a function that returns the bytes of each
# all-to-all (None: no bytes). Backward only calls without replicated text that are not gathered are counted.
ROWS = [
    ((1, 4), [IMAGE], {}, {}, of_ulysses),
    ((1, 4), [TEXT, IMAGE], {}, {}, of_ulysses),
    ((4, 1), [IMAGE], {}, {}, of_ring),
    ((4, 1), [IMAGE], CAUSAL, {}, of_ring),
    ((2, 1), [TEXT, IMAGE], {}, {}, of_ring),
    ((4, 1), [IMAGE], {}, {"rotate_method": "allgather"}, None),
    ((4, 1), [IMAGE], {}, {"rotate_method": "gathered"}, None),
    *[(mesh, [TEXT], {}, {}, None) for mesh in [(1, 1), (2, 1), (1, 2), (2, 2)]],
]


def count(rows, backward):
    counted = []
    for dims, segments, options, of_mode, _ in rows:
        mesh = cpu_mesh(*dims)
        layout = SequenceLayout(tuple(Segment(*segment) for segment in segments), mesh.size())
        qkv = [x.requires_grad_(backward) for x in make_qkv(layout.size(mesh.get_rank()), H, D, B=B)]
        mode = UnifiedAttnMode(mesh, layout=layout, assume_equal=True, **of_mode)
        with mode, torch.set_grad_enabled(backward), Traffic() as forward:
            out = F.scaled_dot_product_attention(*qkv, **options)
        grad = torch.ones_like(out)
        with Traffic() as back:
            if backward:
                out.backward(grad)
        counted.append((forward.sent, forward.gathered, back.sent, forward.others + back.others))
    return counted


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_call_sends_the_documented_bytes(rank_pool, ranks, backward):
    rows = [row for row in ROWS if row[0][0] * row[0][1] == ranks]
    rows = [row for row in rows if not backward or not (row[3] or (TEXT in row[1] and IMAGE in row[1]))]
    for rank, counted in enumerate(rank_pool.run(count, ranks, rows, backward)):
        for row, (forward, gathered, back, others) in zip(rows, counted, strict=True):
            sent, sent_back = row[-1](rank, ranks, TEXT[1] if TEXT in row[1] else 0) if row[-1] else ([], [])
            assert forward == sent, (row, rank)
            assert gathered == ([3 * B * H * max(sizes(13, 4)) * 2 * D * 4] if row[3] else []), (row, rank)
            assert sorted(back) == sorted(sent_back if backward else []), (row, rank)
            assert others == [], row


def count_exchanges(ring, ulysses):
    mesh, counts = cpu_mesh(ring, ulysses), []
    qkv = [x.chunk(mesh.size(), dim=2)[mesh.get_rank()] for x in make_qkv(16, H, D, B=B)]
    for assume_equal in (False, True):
        with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal), Traffic() as traffic:
            F.scaled_dot_product_attention(*qkv)
        counts.append((len(traffic.sent), len(traffic.others)))
    return counts


@pytest.mark.parametrize(("ring", "ulysses", "sent", "rest"), [(1, 1, 0, 0), (2, 1, 1, 1), (1, 2, 2, 1), (2, 2, 3, 2)])
def test_eager_call_exchanges_once_per_mesh_dim(rank_pool, ring, ulysses, sent, rest):
    for counts in rank_pool.run(count_exchanges, ring * ulysses, ring, ulysses):
        assert counts == [(sent, rest), (sent, 0)]


MOVES = ("copy_", "clone", "cat", "_to_copy", "contiguous", "index_select", "repeat", "repeat_interleave", "stack")


def copied(operators):
    """Return the number of elements that each copying operator wrote."""
    elements = Counter()
    for func, _, out in operators.calls:
        if func.overloadpacket.__name__ in MOVES:
            elements[func.overloadpacket.__name__] += out.numel()
    return elements


def count_copies(ring, ulysses):
    mesh = cpu_mesh(ring, ulysses)
    # Models pass [B, S, H, D] with heads and tokens swapped.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(6, 4, D, B=B))
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True), Operators() as of_call:
        F.scaled_dot_product_attention(q, k, v)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True) as cp:
        cp.intercepted = True
        part = cp.shard(q, dim=2)
        with Operators() as of_gather:
            whole = cp.gather(part, dim=2)
    assert torch.equal(whole, q) and whole.is_contiguous()
    # Merging computes in 32 bits, which is a copy to another dtype.
    attention = {name: number / q.numel() for name, number in copied(of_call).items() if name != "_to_copy"}
    return attention, copied(of_gather).total() / q.numel()


@pytest.mark.parametrize(
    ("ring", "ulysses", "expected"), [(1, 2, {"cat": 3, "clone": 1}), (2, 1, {"stack": 2})], ids=["Ulysses", "ring"]
)
def test_each_element_moves_once_into_each_buffer(rank_pool, ring, ulysses, expected):
    for attention, of_gather in rank_pool.run(count_copies, 2, ring, ulysses):
        assert attention == expected
        assert of_gather <= 1.5  # The part and the whole.


class Buffers(TorchDispatchMode):
    """A recorder of the most collective buffers alive when attention is computed or a collective begins."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.alltoall_base_.default:
            known = {id(reference()) for reference in self.alive}
            storages = [x.untyped_storage() for x in args[:2]]
            self.alive += [weakref.ref(x) for x in storages if id(x) not in known]
        if func is torch.ops.c10d.alltoall_base_.default or "attention" in func.__name__:
            # gloo's thread frees the buffers of a finished collective shortly after the waiting rank continues.
            deadline = time.monotonic() + 1
            while self.count() > 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            self.most = max(self.most, self.count())
        return func(*args, **(kwargs or {}))

    def count(self):
        return len({x.data_ptr() for reference in self.alive if (x := reference()) is not None and x.nbytes()})


def count_blocks():
    mesh, most = cpu_mesh(4, 1), []
    for backward in (False, True):
        qkv = [x.chunk(4, dim=2)[mesh.get_rank()].clone().requires_grad_(backward) for x in make_qkv(16, 2)]
        with torch.set_grad_enabled(backward), UnifiedAttnMode(mesh, assume_equal=True), Buffers() as buffers:
            F.scaled_dot_product_attention(*qkv)
        most.append(buffers.most)
    return most


def test_rotating_ring_holds_two_more_blocks(rank_pool):
    assert rank_pool.run(count_blocks, 4) == [[2, 2]] * 4
