"""The sizes of the dims of a mesh. Imports no torch, so that the planner starts at once.

:mod:`.create_mesh` calls it for a mesh that is made, the planner and the commands for one that is planned.
Tests: tests/distributed/test_mesh.py; of :func:`parse_mesh_sizes` tests/cli/test_refusals.py and
tests/planner/test_count.py; tests/cli/test_help.py fails if the planner imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod

# The dims of a mesh for which a largest size can be given. For a new dim, also extend mesh_sizes() here, which
# names the dims one by one, the names in mesh.py, which imports torch, and the order in which create_mesh.py lays
# out the dims.
MESH_NAMES = ("pipe", "batch", "ring", "ulysses", "tensor")


def largest_divisor(ranks: int, at_most: int) -> int:
    """Return the largest divisor of ``ranks`` that is at most ``at_most``. Raise ValueError if one is below 1."""
    if ranks < 1 or at_most < 1:
        raise ValueError(f"{ranks} ranks have no divisor of at most {at_most}; expected at least 1 of both.")
    return next(size for size in range(min(ranks, at_most), 0, -1) if ranks % size == 0)


def mesh_sizes(
    ranks: int, limits: Mapping[str, int | None], *, ranks_per_host: int | None = None
) -> dict[str, int]:
    """Return the sizes of the mesh of ``ranks`` ranks by dim, within the largest sizes ``limits``.

    In the order tensor, pipe, batch, ring, ulysses, each dim with a limit gets the largest divisor of the
    remaining ranks that does not exceed the limit. A tensor, pipe or batch dim without a limit has size 1.
    The remaining ranks go to ulysses, or to ring if only ring has no limit. If neither of them has a limit
    and ``ranks_per_host`` is known, a Ulysses group is only as large as fits on one host.

    Args:
        ranks: Number of ranks.
        limits: The largest sizes, by names of ``MESH_NAMES``. None is as if the name were missing: no limit
            for ring and ulysses, size 1 for tensor, pipe and batch.
        ranks_per_host: Number of consecutive ranks on each host. None if it is unknown, as if all were on one.

    Returns:
        The sizes of batch, ring and ulysses, and those of tensor and pipe if they are larger than 1.

    >>> mesh_sizes(8, {})
    {'batch': 1, 'ring': 1, 'ulysses': 8}
    >>> mesh_sizes(8, {"ulysses": 2})
    {'batch': 1, 'ring': 4, 'ulysses': 2}
    >>> mesh_sizes(6, {"ring": 4})
    {'batch': 1, 'ring': 3, 'ulysses': 2}
    >>> mesh_sizes(16, {}, ranks_per_host=8)
    {'batch': 1, 'ring': 2, 'ulysses': 8}
    >>> mesh_sizes(8, {"tensor": 2, "ring": 4})
    {'batch': 1, 'ring': 4, 'ulysses': 1, 'tensor': 2}

    Raises:
        TypeError: A limit is not an integer.
        ValueError: ``ranks`` or a limit is below 1, or a limit has another name. Or ranks are left over: ring
            and ulysses both have a limit, and the sizes that divide the number of ranks do not multiply to it.
    """
    for name, limit in limits.items():
        if name not in MESH_NAMES:
            raise ValueError(f"mesh has a dim {name!r}; expected {', '.join(MESH_NAMES)}.")
        check_maximum(name, limit)
    remaining = ranks
    sizes: dict[str, int] = {}
    for name in ("tensor", "pipe", "batch"):
        sizes[name] = largest_divisor(remaining, limits.get(name) or 1)
        remaining //= sizes[name]
    max_ring, max_ulysses = limits.get("ring"), limits.get("ulysses")
    if max_ring is None and max_ulysses is None and ranks_per_host is not None:
        # Choose a divisor of the ranks of a host, so that no Ulysses group, whose ranks are consecutive, spans
        # two hosts. Tensor ranks are neighbours inside of a Ulysses group, so if they do not divide the ranks
        # of a host, some tensor group already spans two, and a larger Ulysses group would as well.
        max_ulysses = 1
        if ranks_per_host % sizes["tensor"] == 0:
            max_ulysses = gcd(remaining, ranks_per_host // sizes["tensor"])
    ring = largest_divisor(remaining, max_ring or 1)
    remaining //= ring
    ulysses = largest_divisor(remaining, max_ulysses or remaining)
    remaining //= ulysses
    if max_ring is None:
        ring *= remaining
        remaining = 1
    outer = {name: sizes[name] for name in ("tensor", "pipe") if sizes[name] > 1}
    sizes = {"batch": sizes["batch"], "ring": ring, "ulysses": ulysses, **outer}
    if remaining > 1:
        requested = ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)
        used = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh is {requested}, which does not fit {ranks} ranks: {used} uses {prod(sizes.values())} of them. The "
            f"largest sizes ring={ring * remaining}, ulysses={ulysses * remaining} or "
            f"batch={sizes['batch'] * remaining} would fit; or leave one of ring and ulysses open: it takes what "
            "remains."
        )
    return sizes


def check_maximum(name: str, maximum: int | None) -> None:
    """Raise TypeError or ValueError if ``maximum``, the argument ``name``, is neither None nor a positive integer."""
    if maximum is not None and (isinstance(maximum, bool) or not isinstance(maximum, int)):
        raise TypeError(f"{name} is {maximum!r}; expected a positive integer, or None to leave it open.")
    if maximum is not None and maximum < 1:
        raise ValueError(f"{name} is {maximum}; expected at least 1, or None to leave it open.")


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
