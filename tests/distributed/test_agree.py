"""The exchange before a payload is sent: its cost, and its message on every rank."""

import inspect
import re
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from para_core.distributed.agree import agree, exchange, together
from para_core.distributed.collectives import broadcast_bytes
from para_core.distributed.mesh import one_rank, sequence_mesh
from para_core.distributed.records import Signature


class Gathered(TorchDispatchMode):
    """A counter of all-gathers and of the bytes that each receives from one rank."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "gather" in func.__name__:
            self.bytes.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def mesh_of(ring, ulysses):
    return sequence_mesh(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")))


def agree_on_a_mesh(ring, ulysses):
    mesh = mesh_of(ring, ulysses)
    same = Signature.of({"shape": [1, 2, 3], "a long value": "x" * 10_000})
    with Gathered() as gathered:
        own = agree(same, mesh, (10 * dist.get_rank(), -1))
    return own, agree(same, mesh), gathered.bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_consistent_ranks_exchange_a_few_bytes(rank_pool, ring, ulysses):
    ranks = ring * ulysses
    for own, nothing, gathered in rank_pool.run(agree_on_a_mesh, ranks, ring, ulysses):
        assert own == [(10 * rank, -1) for rank in range(ranks)]
        assert nothing == [()] * ranks
        assert len(gathered) == (ring > 1) + (ulysses > 1)
        assert gathered[0] <= 64


def raised_by(call, *args, **kwargs):
    with pytest.raises((TypeError, ValueError, RuntimeError, ImportError)) as error:
        call(*args, **kwargs)
    return type(error.value).__name__, str(error.value)


def step(mesh, *errors):
    """Run a step that raises the first of ``errors``, and a step inside it that raises the second."""
    with together(mesh, "the step failed"):
        if errors[0] is not None:
            raise errors[0]
        if errors[1:]:
            step(mesh, *errors[1:])


def disagree():
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    alike = {"dtype": "float32", "shape": [1, 2]}
    long = "中" * 5000
    errors = {
        "a value": raised_by(agree, {**alike, "dtype": "bfloat16" if rank == 2 else "float32"}, mesh),
        "a field": raised_by(agree, {**alike, **({"mask": True} if rank == 3 else {})}, mesh),
        "own words": raised_by(
            agree,
            {"rank": rank},
            mesh,
            explain=lambda records: f"{[record['rank'] for record in records]}",
        ),
        "one rank": raised_by(agree, TypeError(long) if rank == 1 else Signature.of(alike), mesh),
        "all ranks": raised_by(agree, RuntimeError(f"no {rank}"), mesh),
        "all ranks alike": raised_by(agree, ValueError("no"), mesh),
        "exchange": raised_by(exchange, ImportError("no torch") if rank == 2 else {"error": None}, mesh),
        "a step": raised_by(step, mesh, KeyError("x") if rank == 1 else None),
        "an inner step": raised_by(step, mesh, None, TypeError("y") if rank == 3 else None),
        "no inner step": raised_by(step, mesh, ValueError("z") if rank == 0 else None, None),
    }
    own = agree({"scale": 1, "b": 2} if rank else {"b": 2, "scale": 1.0}, mesh, (rank,))
    return errors, own, exchange({"rank": rank, "of its own": "é" * rank}, mesh)


def test_inconsistent_ranks_raise_same_error(rank_pool):
    for errors, own, records in rank_pool.run(disagree, 4):
        assert errors["a value"][0] == errors["a field"][0] == "ValueError"
        assert re.search(r"dtype: .*rank 0 .*float32, rank 2 .*bfloat16", errors["a value"][1])
        assert re.search(r"mask: .*rank 0 .*, rank 3 .*True", errors["a field"][1])
        assert errors["own words"][1] == "[0, 1, 2, 3]"
        assert errors["one rank"][0] == "TypeError"
        assert errors["one rank"][1] == "sequence rank 1: " + "中" * 5000
        assert errors["all ranks"] == ("RuntimeError", "sequence rank 0: no 0")
        assert errors["all ranks alike"] == ("ValueError", "sequence rank 0: no")
        assert errors["exchange"] == ("ImportError", "sequence rank 2: no torch")
        assert errors["a step"] == ("RuntimeError", "sequence rank 1: the step failed: KeyError: 'x'")
        assert errors["an inner step"] == ("TypeError", "sequence rank 3: the step failed: y")
        assert errors["no inner step"] == ("ValueError", "sequence rank 0: the step failed: z")
        assert own == [(0,), (1,), (2,), (3,)]
        assert records == [{"rank": rank, "of its own": "é" * rank} for rank in range(4)]


def test_a_signature_is_equal_for_equal_records_only():
    records = [{"a": 1}, {"a": 2}, {"a": "1"}, {"a": 1, "b": 1}, {}]
    assert max(Counter(Signature.of(record).digest for record in records).values()) == 1
    assert Signature.of({"a": (1, 2)}) == Signature.of({"a": [1, 2]})


def test_one_rank_agrees_with_itself_and_still_raises():
    mesh = one_rank("cpu")
    assert agree({"a": 1}, mesh, (7,)) == [(7,)]
    with pytest.raises(ValueError, match="sequence rank 0: bad"):
        agree(ValueError("bad"), mesh)


class Devices(TorchDispatchMode):
    """A recorder of the device types of all tensors that are made or sent."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.types |= {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
        return result


def groups_without_a_cpu():
    """Return the results exchanged over two groups that accept CUDA tensors only, and the groups that exist
    afterwards.
    """
    timeout = timedelta(seconds=123)
    groups = [
        dist.new_group(backend="cuda:gloo", timeout=timeout),
        dist.new_group([3, 1, 2, 0], backend="cuda:gloo", timeout=timeout, **_as_given()),
    ]
    outs = []
    for group in groups:
        for group_dim in ("ring", "ulysses"):
            mesh = sequence_mesh(group, group_dim=group_dim)
            with Devices() as devices:
                own = agree({"a": 1}, mesh, (dist.get_rank(),))
                first = broadcast_bytes(torch.full((3,), dist.get_rank(), dtype=torch.uint8), mesh)
            outs.append(([rank for (rank,) in own], dist.get_process_group_ranks(group), first.tolist(), devices.types))
    cpu_groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc.startswith("para_core")]
    return outs, [group._get_backend(torch.device("cpu")).options._timeout == timeout for group in cpu_groups]


def _as_given():
    # torch 2.11 always sorts the ranks of a group.
    return {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def test_group_without_cpu_gets_one_cpu_group(rank_pool):
    for outs, timeouts_are_kept in rank_pool.run(groups_without_a_cpu, 4):
        for own, ranks, first, devices in outs:
            assert own == ranks
            assert first == [ranks[0]] * 3
            assert devices == {"cpu"}
        assert timeouts_are_kept == [True, True]
