"""The shape of a mesh, and all shapes that a number of ranks can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from para_core.attention.features import load
from para_core.distributed.mesh_shape import MESH_NAMES
from para_core.option_values import RING_STYLES


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh dims. Ranks along ``tensor`` are neighbours, those along ``pipe`` farthest apart.

    Args:
        batch, pipe, ring, ulysses, tensor (`int`, defaults to `1`): Sizes of the dims; ``pipe`` is the number
            of pipeline stages, which work one after the other.
        ring_method (`str`): How ranks along ``ring`` exchange keys: ``"rotate"`` sends them to all ranks;
            otherwise a rotate_method whose ranks form a grid, such as ``"2d"``, Attention2D
            (arXiv:2503.15758).
        fsdp (`bool`, defaults to `False`): Whether the sequence ranks shard the weights with FSDP2, and
            gather each block before it runs.
    """

    batch: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    ring_method: str = "rotate"
    fsdp: bool = False

    @property
    def ranks(self) -> int:
        return self.batch * self.pipe * self.sequence * self.tensor

    @property
    def sequence(self) -> int:
        return self.ring * self.ulysses

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh dims by name."""
        return {name: getattr(self, name) for name in MESH_NAMES}

    def __str__(self) -> str:
        """Return the mesh dims with several ranks, and the ring method and FSDP2 if they are used."""
        words = [f"{name} {size}" for name, size in self.sizes.items() if size > 1] or ["one rank"]
        if self.ring_method != "rotate":
            words.append(self.ring_method)
        if self.fsdp:
            words.append("fsdp")
        return ", ".join(words)


def all_shapes(ranks: int) -> Iterator[MeshShape]:
    """Yield the shape of every mesh of ``ranks`` ranks, without FSDP2. The size of ``batch`` is 1 or 2."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for batch, stages, tensor, ring in product((1, 2), sizes, sizes, sizes):
        ulysses, rest = divmod(ranks, batch * stages * tensor * ring)
        # A pipeline cannot use stages and tensor parallelism together.
        if rest or (stages > 1 and tensor > 1):
            continue
        shape = MeshShape(batch, stages, ring, ulysses, tensor)
        yield shape
        for name in RING_STYLES:
            # A grid with one column is the same as a ring.
            if grid_of(name, ring, 1, 1)[1] > 1:
                yield replace(shape, ring_method=name)


def grid_of(ring_method: str, ranks: int, heads: int, key_heads: int) -> tuple[int, int]:
    """Return ``(rows, columns)`` of the ring ranks: keys go to a column, queries to a row. A ring is one column."""
    style = RING_STYLES.get(ring_method)
    if style is None or style.grid is None:
        return ranks, 1
    shape: tuple[int, int] = load(style.grid)(ranks, heads, key_heads)
    return shape
