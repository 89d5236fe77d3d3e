"""The sizes of the dims of a mesh. Imports no torch, so that the planner starts at once."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

# The dims of a mesh for which a largest size can be given.
MESH_NAMES = ("pipe", "batch", "ring", "ulysses", "tensor")


def largest_divisor(ranks: int, at_most: int) -> int:
    """Return the largest divisor of ``ranks`` that is at most ``at_most``."""
    return next(size for size in range(min(ranks, at_most), 0, -1) if ranks % size == 0)


def choose_mesh_shape(
    num_ranks: int,
    *,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
    ranks_per_host: int | None = None,
) -> tuple[int, int, int]:
    """Return the sizes of the mesh dims ``(batch, ring, ulysses)`` for ``num_ranks`` ranks.

    In the order batch, ring, ulysses, each dim with a maximum gets the largest divisor of the remaining ranks
    that does not exceed the maximum. A batch dim without a maximum has size 1. The remaining ranks go to
    ulysses, or to ring if only ring has no maximum. If neither of them has a maximum and ``ranks_per_host``
    is known, a Ulysses group is only as large as fits on one host.

    >>> choose_mesh_shape(8)
    (1, 1, 8)
    >>> choose_mesh_shape(8, max_batch_dim_size=2)
    (2, 1, 4)
    >>> choose_mesh_shape(8, max_ulysses_dim_size=2)
    (1, 4, 2)
    >>> choose_mesh_shape(6, max_ring_dim_size=4)
    (1, 3, 2)
    >>> choose_mesh_shape(16, ranks_per_host=8)
    (1, 2, 8)

    Raises:
        TypeError, ValueError: A maximum is not a positive integer, or ranks are left over.
    """
    maxima = {
        "max_batch_dim_size": max_batch_dim_size,
        "max_ring_dim_size": max_ring_dim_size,
        "max_ulysses_dim_size": max_ulysses_dim_size,
    }
    for name, maximum in maxima.items():
        check_maximum(name, maximum)

    batch = largest_divisor(num_ranks, max_batch_dim_size or 1)
    remaining = num_ranks // batch
    if max_ring_dim_size is None and max_ulysses_dim_size is None and ranks_per_host is not None:
        # Choose a divisor of ranks_per_host, so that no Ulysses group, whose ranks are consecutive, spans two
        # hosts.
        max_ulysses_dim_size = gcd(remaining, ranks_per_host)
    ring = largest_divisor(remaining, max_ring_dim_size or 1)
    remaining //= ring
    ulysses = largest_divisor(remaining, max_ulysses_dim_size or remaining)
    remaining //= ulysses
    if max_ring_dim_size is None:
        ring, remaining = ring * remaining, 1
    if remaining > 1:
        raise ValueError(
            f"{num_ranks} ranks do not fit: batch {batch} × ring {ring} × ulysses {ulysses} uses "
            f"{batch * ring * ulysses} of them. max_ring_dim_size={ring * remaining}, "
            f"max_ulysses_dim_size={ulysses * remaining} or max_batch_dim_size={batch * remaining} would fit; or leave "
            "one of ring and ulysses open (None): it takes what remains."
        )
    return batch, ring, ulysses


def check_maximum(name: str, maximum: int | None) -> None:
    """Raise TypeError or ValueError if ``maximum``, the argument ``name``, is neither None nor a positive integer."""
    if maximum is not None and (isinstance(maximum, bool) or not isinstance(maximum, int)):
        raise TypeError(f"{name} is {maximum!r}; expected a positive integer, or None to leave it open.")
    if maximum is not None and maximum < 1:
        raise ValueError(f"{name} is {maximum}; expected at least 1, or None to leave it open.")


def mesh_sizes(ranks: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a mesh of ``ranks`` ranks by dim, within the largest sizes that ``limits`` states.

    The dims are those of :func:`~para_core.distributed.create_mesh.init_context_parallel_mesh`. Raise
    ValueError if ``ranks`` exceeds the product of these sizes.

    >>> mesh_sizes(8, {"tensor": 2, "ring": 4})
    {'batch': 1, 'ring': 4, 'ulysses': 1, 'tensor': 2}
    """
    ranks_left, open_limits = ranks, dict(limits)
    outer: dict[str, int] = {}
    for name in ("tensor", "pipe"):
        size = largest_divisor(ranks_left, open_limits.pop(name, 1))
        ranks_left //= size
        if size > 1:
            outer[name] = size
    try:
        sizes = choose_mesh_shape(
            ranks_left, **{f"max_{name}_dim_size": size for name, size in open_limits.items()}
        )
    except ValueError as error:
        raise ValueError(f"mesh is too small: {error}") from None
    return {**dict(zip(("batch", "ring", "ulysses"), sizes, strict=True)), **outer}


def parse_mesh_sizes(text: str) -> tuple[tuple[str, int], ...]:
    """Parse largest sizes of mesh dims, such as ``"batch=2,ring=4"``. Raise ValueError if a name or size is
    invalid.

    >>> parse_mesh_sizes("batch=2,ring=4")
    (('batch', 2), ('ring', 4))
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.strip().partition("=")
        if name not in MESH_NAMES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh has {part.strip()!r}; expected {', '.join(MESH_NAMES)} and their largest sizes: "
                "'batch=2,ring=2'."
            )
        if name in sizes:
            raise ValueError(f"mesh has two sizes for {name}; expected one.")
        sizes[name] = int(size)
    return tuple(sizes.items())
