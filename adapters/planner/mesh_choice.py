"""Choose the sizes of the default mesh by a fixed rule, for cases that the planner does not predict."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from para_core.attention.attention_options import RotateMethod


@dataclass(frozen=True)
class MeshChoice:
    """Number of ranks along each mesh dim, the reason for the choice, and the ``rotate_method`` of the ring."""

    batch: int
    ring: int
    ulysses: int
    reason: str
    rotate_method: RotateMethod = "alltoall"
    tensor: int = 1


@dataclass(frozen=True)
class Unpredicted:
    """The reason why the planner did not predict a mesh."""

    reason: str
    # Whether the planner raised an error that it does not document.
    failed: bool = False


def choose_mesh(
    num_ranks: int,
    num_heads: int | None,
    guidance: str | None,
    ranks_per_host: int | None = None,
    weights: str | None = None,
) -> MeshChoice:
    """Return the sizes of a mesh of ``num_ranks`` ranks by a fixed rule.

    With guidance, each of the two CFG branches gets half of the ranks. The ranks of a branch go to Ulysses, as many as
    the key heads and one host allow, and the rest to the ring. Sharded weights come first: ``"tensor"`` takes the
    fewest ranks (at least two) that divide the heads; ``"fsdp"`` keeps at least two ranks per branch.

    Args:
        num_ranks: Number of ranks.
        num_heads: Number of key heads; None if unknown, which sets no limit.
        guidance: Reason to expect two CFG branches, such as ``"guidance_scale is 6.0 by default"``; None without
            guidance.
        ranks_per_host: Number of ranks on each host; None if all are on one host, or if it is unknown.
        weights: ``"fsdp"`` or ``"tensor"``; with any other value every rank holds all weights.

    >>> def sizes(*args, **options):
    ...     choice = choose_mesh(*args, **options)
    ...     return choice.batch, choice.ring, choice.ulysses
    >>> sizes(8, 24, None), sizes(8, 2, "guidance_scale is 6.0 by default"), sizes(16, 24, None, ranks_per_host=8)
    ((1, 1, 8), (2, 2, 2), (1, 2, 8))
    >>> choose_mesh(2, 24, "guidance_scale is 5.0 by default", weights="fsdp").reason
    "weights='fsdp', guidance_scale is 5.0 by default, 24 heads"
    """
    on_host = gcd(num_ranks, ranks_per_host or num_ranks)
    sizes = [size for size in range(2, on_host + 1) if on_host % size == 0 and (num_heads or size) % size == 0]
    tensor = sizes[0] if weights == "tensor" and sizes else 1
    left = num_ranks // tensor
    # FSDP2 shards weights over the ranks of one branch, so a branch needs at least two.
    batch = 2 if guidance is not None and left % 2 == 0 and (weights != "fsdp" or left > 2) else 1
    left //= batch
    # A group of consecutive ranks is on one host if its size divides the number of ranks on the host.
    neighbours = gcd(left, max((ranks_per_host or num_ranks) // tensor, 1))
    heads_left = left if num_heads is None else num_heads // tensor
    ulysses = next(size for size in range(min(neighbours, heads_left), 0, -1) if neighbours % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    hosts = "" if ranks_per_host in (None, num_ranks) else f", {ranks_per_host} ranks on a host"
    sharded = f"weights={weights!r}, " if weights in ("fsdp", "tensor") else ""
    reason = f"{sharded}{guidance or 'no guidance by default'}, {heads}{hosts}"
    return MeshChoice(batch, left // ulysses, ulysses, reason, tensor=tensor)
