"""Collectives and bytes of an attention call, compared with the formulas in the docstrings."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from tests.attention.one_device import make_qkv

B, H, D = 2, 5, 8


class Traffic(TorchDispatchMode):
    """A counter of all-to-alls, all-gathers and the bytes that this rank sends in them. It lists other collectives by
    name.
    """

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
        elif func is torch.ops.c10d._allgather_base_.default and args[0].dtype != torch.uint8:
            self.gathered.append(args[0].nbytes - args[1].nbytes)
        elif func.namespace in {"_c10d_functional", "c10d"} and "wait" not in func.__name__:
            self.others.append(func.__name__)
        return func(*args, **(kwargs or {}))


def count(ring, ulysses, S, segments=None, assume_equal=True, **options):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    ranks, rank = ring * ulysses, mesh.get_rank()
    layout = SequenceLayout(tuple(Segment(*segment) for segment in segments or [("tokens", S, False)]), ranks)
    q, k, v = make_qkv(layout.size(rank), H, D, B=B)
    with torch.no_grad(), UnifiedAttnMode(mesh, layout=layout, assume_equal=assume_equal), Traffic() as traffic:
        F.scaled_dot_product_attention(q, k, v, **options)
    return traffic.sent, traffic.others


def count_training(ring, ulysses, S, **options):
    """Return the bytes sent per collective, forward and backward, and the elements that the eager forward copied."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.tensor_split(ring * ulysses, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(S, H, D, B=B)]
    with UnifiedAttnMode(mesh, assume_equal=True) as cp, cp.using(cp.sequence(S)):
        with Traffic() as forward:
            out = F.scaled_dot_product_attention(*qkv, **options)
        grad = torch.ones_like(out)
        with Traffic() as backward:
            out.backward(grad)
    return forward.sent, backward.sent, forward.others + backward.others


class Copies(TorchDispatchMode):
    """A counter of the elements that each copying operator moved."""

    MOVES = ("copy_", "clone", "cat", "_to_copy", "contiguous", "index_select", "repeat_interleave", "stack")

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.MOVES:
            self.elements[name] = self.elements.get(name, 0) + out.numel()
        return out


def count_copies(ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    # Models pass [B, S, H, D] with heads and tokens swapped.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(6, 4, D, B=B))
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=True), Copies() as copies:
        F.scaled_dot_product_attention(q, k, v)
    return copies.elements, q.numel()


def sizes(total, ranks):
    return [len(part) for part in torch.arange(total).tensor_split(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("num_text", [0, 3])
def test_ulysses_is_two_all_to_all(rank_pool, ranks, num_text):
    heads, tokens = sizes(H, ranks), sizes(13, ranks)
    segments = [("text", num_text, True), ("image", 13, False)] if num_text else None
    for rank, (sent, others) in enumerate(rank_pool.run(count, ranks, 1, ranks, 13, segments)):
        peers = [peer for peer in range(ranks) if peer != rank]
        way_in = B * 4 * sum(tokens[rank] * (heads[peer] * D + heads[peer] * 2 * D) for peer in peers)
        way_out = B * 4 * D * heads[rank] * sum(tokens[peer] + num_text for peer in peers)
        assert sent == [way_in, way_out], f"rank {rank}"
        assert others == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_ring_hops_are_ranks_minus_one(rank_pool, ranks, options):
    tokens = sizes(13, ranks)
    for rank, (sent, others) in enumerate(rank_pool.run(count, ranks, ranks, 1, 13, **options)):
        # At step i a rank passes on the block that started i ranks before it.
        assert sent == [B * H * tokens[(rank - step) % ranks] * 2 * D * 4 for step in range(ranks - 1)], f"rank {rank}"
        assert others == []


def count_gathered():
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ring", "ulysses"))
    q, k, v = (x.tensor_split(4, dim=2)[mesh.get_rank()] for x in make_qkv(13, H, D, B=B))
    mode = UnifiedAttnMode(mesh, assume_equal=True, rotate_method="allgather")
    with torch.no_grad(), mode as cp, cp.using(cp.sequence(13)), Traffic() as traffic:
        F.scaled_dot_product_attention(q, k, v)
    return traffic.sent, traffic.gathered, traffic.others


def test_gathering_ring_is_one_collective(rank_pool):
    for traffic in rank_pool.run(count_gathered, 4):
        assert traffic == ([], [3 * B * H * max(sizes(13, 4)) * 2 * D * 4], [])


def test_replicated_text_does_not_travel_around_ring(rank_pool):
    segments = [("text", 100, True), ("image", 4, False)]
    for sent, _ in rank_pool.run(count, 2, 2, 1, 104, segments):
        assert sent == [B * H * 2 * 2 * D * 4]


def test_hybrid_mesh_is_all_to_all_around_hops(rank_pool):
    for sent, others in rank_pool.run(count, 4, 2, 2, 16):
        assert len(sent) == 2 + 1
        assert others == []


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_keys_that_every_rank_holds_need_no_communication(rank_pool, ring, ulysses):
    for sent, others in rank_pool.run(count, ring * ulysses, ring, ulysses, 5, [("text", 5, True)]):
        assert (sent, others) == ([], [])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses", "num_dims"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_eager_call_exchanges_once_per_mesh_dim(rank_pool, ring, ulysses, num_dims):
    for _, others in rank_pool.run(count, ring * ulysses, ring, ulysses, 13, assume_equal=False):
        assert len(others) == num_dims
        assert all("gather" in name for name in others)


def test_one_rank_sends_nothing(rank_pool):
    assert rank_pool.run(count, 1, 1, 1, 13, assume_equal=False) == [([], [])]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_of_ulysses_is_two_all_to_all(rank_pool, ranks):
    heads, tokens = sizes(H, ranks), sizes(13, ranks)
    for rank, (forward, backward, others) in enumerate(rank_pool.run(count_training, ranks, 1, ranks, 13)):
        peers = [peer for peer in range(ranks) if peer != rank]
        to_heads = B * 4 * D * sum(tokens[rank] * heads[peer] for peer in peers)
        to_tokens = B * 4 * D * heads[rank] * sum(tokens[peer] for peer in peers)
        assert forward == [3 * to_heads, to_tokens], f"rank {rank}"
        assert backward == [to_heads, 3 * to_tokens], f"rank {rank}"
        assert others == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_gradient_of_ring_sends_blocks_and_sums(rank_pool, ranks, options):
    tokens = sizes(13, ranks)
    for rank, (forward, backward, others) in enumerate(rank_pool.run(count_training, ranks, ranks, 1, 13, **options)):
        per_token = B * H * 2 * D * 4
        hops = [per_token * tokens[(rank - step) % ranks] for step in range(ranks - 1)]
        # A block that arrived at step i passes its gradient on, from the first step in which it is not the rank's own.
        gradients = [per_token * tokens[(rank - step) % ranks] for step in range(1, ranks)]
        assert forward == hops, f"rank {rank}"
        assert sorted(backward) == sorted(hops + gradients), f"rank {rank}"
        assert others == []


def test_ulysses_moves_each_element_once_into_each_buffer(rank_pool):
    for elements, numel in rank_pool.run(count_copies, 2, 1, 2):
        assert elements == {"cat": 3 * numel, "clone": numel}


def test_a_ring_moves_keys_and_values_once(rank_pool):
    for elements, numel in rank_pool.run(count_copies, 2, 2, 1):
        assert elements.pop("stack") == 2 * numel
        assert set(elements) <= {"_to_copy"}  # Merging computes in 32 bits.
