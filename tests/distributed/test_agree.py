"""The exchange before a payload is sent: its cost, and its message on every rank."""

import re

import pytest
import torch
import torch.distributed as dist

from para_core.distributed.agree import agree, broadcast_bytes, exchange, together
from para_core.distributed.mesh import sequence_mesh
from para_core.distributed.records import Signature
from tests.modes.outcomes import outcome
from tests.operators import Operators
from tests.tiny import cpu_mesh


def agree_on_a_mesh(ring, ulysses):
    """Return what the ranks agree on, and the bytes that each all-gather of the first call receives from one rank."""
    mesh = sequence_mesh(cpu_mesh(ring, ulysses))
    same = Signature.of({"shape": [1, 2, 3], "a long value": "x" * 10_000})
    with Operators() as ran:
        own = agree(same, mesh, (10 * dist.get_rank(), -1))
    gathered = [args[1].numel() for func, args, _ in ran.calls if "gather" in func.__name__]
    return own, agree(same, mesh), gathered


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2)])
def test_consistent_ranks_exchange_a_few_bytes(rank_pool, ring, ulysses):
    ranks = ring * ulysses
    for own, nothing, gathered in rank_pool.run(agree_on_a_mesh, ranks, ring, ulysses):
        assert own == [(10 * rank, -1) for rank in range(ranks)]
        assert nothing == [()] * ranks
        assert len(gathered) == (ring > 1) + (ulysses > 1)
        assert gathered[0] <= 64


def step(mesh, *errors, exchanged=None):
    """Run a step that raises the first of ``errors``, and one inside it: an exchange, or a step with the second."""
    with together(mesh, "the step failed"):
        if errors[0] is not None:
            raise errors[0]
        if exchanged is not None:
            exchange(exchanged, mesh)
        if errors[1:]:
            step(mesh, *errors[1:])


LONG = "中" * 5000
ALIKE = {"dtype": "float32", "shape": [1, 2]}
# What rank ``rank`` does, and the pattern of the error of every rank.
DISAGREEMENTS = {
    "a value": (
        lambda mesh, rank: agree({**ALIKE, "dtype": "bfloat16" if rank == 2 else "float32"}, mesh),
        r"ValueError: .*dtype: .*rank 0 .*float32, rank 2 .*bfloat16",
    ),
    "a field": (
        lambda mesh, rank: agree({**ALIKE, **({"mask": True} if rank == 3 else {})}, mesh),
        r"ValueError: .*mask: .*rank 0 .*, rank 3 .*True",
    ),
    "own words": (
        lambda mesh, rank: agree({"rank": rank}, mesh, explain=lambda records: f"{[x['rank'] for x in records]}"),
        r"ValueError: \[0, 1, 2, 3\]$",
    ),
    "one rank": (
        lambda mesh, rank: agree(TypeError(LONG) if rank == 1 else Signature.of(ALIKE), mesh),
        f"TypeError: mesh rank 1: {LONG}$",
    ),
    "all ranks": (lambda mesh, rank: agree(RuntimeError(f"no {rank}"), mesh), "RuntimeError: mesh rank 0: no 0$"),
    "a long number": (
        lambda mesh, rank: agree(ALIKE, mesh, (2**63 if rank == 1 else 0,)),
        r"ValueError: mesh rank 1: .*\[9223372036854775808\].* at most 3 of 64 bits",
    ),
    "no JSON": (lambda mesh, rank: agree({"a": {1} if rank == 1 else 1}, mesh), "TypeError: mesh rank 1: .* set "),
    "no pickle": (lambda mesh, rank: exchange(rank or (lambda: 0), mesh), "TypeError: mesh rank 0: .* pickle"),
    "exchange": (
        lambda mesh, rank: exchange(ImportError("bad") if rank == 2 else {"error": None}, mesh),
        "ImportError: mesh rank 2: bad$",
    ),
    "a step": (
        lambda mesh, rank: step(mesh, KeyError("x") if rank == 1 else None),
        "RuntimeError: mesh rank 1: the step failed: KeyError: 'x'$",
    ),
    "an inner step": (
        lambda mesh, rank: step(mesh, None, TypeError("y") if rank == 3 else None),
        "TypeError: mesh rank 3: the step failed: y$",
    ),
    "no inner step": (
        lambda mesh, rank: step(mesh, ValueError("z") if rank == 0 else None, None),
        "ValueError: mesh rank 0: the step failed: z$",
    ),
    "no exchange": (
        lambda mesh, rank: step(mesh, ValueError("z") if rank == 1 else None, exchanged=rank),
        "ValueError: mesh rank 1: the step failed: z$",
    ),
    "an inner exchange": (lambda mesh, rank: step(mesh, None, exchanged=TypeError("z")), "TypeError: mesh rank 0: z$"),
}


def disagree():
    mesh, rank = sequence_mesh(cpu_mesh(2, 2)), dist.get_rank()
    errors = {name: outcome(lambda call=call: call(mesh, rank)) for name, (call, _) in DISAGREEMENTS.items()}
    own = agree({"scale": 1, "b": 2} if rank else {"b": 2, "scale": 1.0}, mesh, (rank,))
    first = broadcast_bytes(torch.tensor([rank + 5, 0], dtype=torch.uint8), mesh).tolist()
    return errors, own, exchange({"rank": rank, "of its own": "é" * rank}, mesh), first


def test_inconsistent_ranks_raise_same_error(rank_pool):
    for errors, own, records, first in rank_pool.run(disagree, 4):
        for name, (_, words) in DISAGREEMENTS.items():
            assert re.match(words, errors[name]), (name, errors[name])
        assert (own, first) == ([(0,), (1,), (2,), (3,)], [5, 0])
        assert records == [{"rank": rank, "of its own": "é" * rank} for rank in range(4)]
