"""The settings of the loader, checked.

`loader` makes them in ComfyUI's process, and `ranks` sends them to the ranks. Nothing here imports para_core.
Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

AUTOMATIC = "auto"
WEIGHTS = ("replicated", "fsdp")
_DIMS = ("ring", "ulysses")


@dataclass(frozen=True)
class Settings:
    """Settings of a model on ranks. :meth:`of` checks them. The fields are plain values, because they are
    pickled for the ranks, which make the same settings of them.

    Args:
        ranks: Number of processes.
        ring, ulysses: Sizes of the mesh dims, whose product is ``ranks``; None for both if they are chosen
            automatically.
        cache: Threshold of First Block Cache; 0 for none.
        weights: ``"replicated"`` or ``"fsdp"``.
    """

    ranks: int
    ring: int | None = None
    ulysses: int | None = None
    cache: float = 0.0
    weights: str = "replicated"

    @classmethod
    def of(cls, *, ranks: int, mesh: str, cache: float, weights: str) -> Settings:
        """Return the settings for the inputs of the node. Raise ValueError if an input is not valid."""
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks is {ranks!r}; expected the number of processes, 1 or more.")
        if not math.isfinite(cache) or cache < 0:
            raise ValueError(f"cache is {cache!r}; expected a threshold such as 0.1, or 0 for no cache.")
        if weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}; expected one of {', '.join(WEIGHTS)}.")
        ring, ulysses = _mesh(mesh, ranks)
        return cls(ranks, ring, ulysses, float(cache), weights)


def _mesh(mesh: str, ranks: int) -> tuple[int | None, int | None]:
    """Return the sizes of ring and ulysses, or None for both if ``mesh`` leaves the choice.

    >>> _mesh("ulysses 2 ring 3", 6)
    (3, 2)
    """
    words = re.findall(r"[a-z]+|[0-9]+", mesh.lower())
    has_others = re.fullmatch(r"[a-z0-9\s,=×]*", mesh.lower()) is None
    if words in ([], [AUTOMATIC]) and not has_others:
        return None, None
    names, sizes = words[::2], words[1::2]
    known = len(names) == len(sizes) == len(set(names)) and set(names) <= set(_DIMS)
    if has_others or not known or not all(size.isdigit() for size in sizes):
        raise ValueError(
            f"mesh is {mesh!r}; expected 'auto', or sizes such as 'ulysses 2', 'ring 3' or 'ulysses 2 ring 2'."
        )
    given = dict(zip(names, map(int, sizes), strict=True))
    if math.prod(given.values()) != ranks:
        raise ValueError(
            f"mesh is {mesh!r}, which is {math.prod(given.values())} ranks, and ranks is {ranks}; expected a mesh "
            "whose sizes multiply to the number of ranks."
        )
    return given.get("ring", 1), given.get("ulysses", 1)
