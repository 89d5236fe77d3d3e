"""Block masks: which blocks of queries see which blocks of keys.

Query i sees key j if ``block_mask[i // query_block, j // key_block]`` is True. i and j are positions in the
whole sequence, whatever ranks hold the tokens. The user's tensor is read once; everything else is integer
arithmetic on the host.

:class:`~para_core.modes.block_sparse.BlockSparseAttnMode` makes the mask; :mod:`.tiles` asks it for tiles,
and :mod:`.direct_ring` which ranks see which. Tests: tests/attention/test_block_sparse.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from para_core.attention.option import AttentionOption
from para_core.layout.runs import intersect
from para_core.layout.sequence import Run

if TYPE_CHECKING:
    from para_core.attention.ring_plan import RingStyle


@dataclass(frozen=True)
class BlockMask(AttentionOption):
    """A block mask as one integer per query block: bit j of row i says whether query block i sees key block
    j.

    Args:
        num_query_blocks, num_key_blocks: Numbers of blocks, which must fit the lengths of each call.
        query_block, key_block: Tokens per block. The last block of a sequence may be shorter.
        bits: The rows in hexadecimal, joined by commas. It is a string because Dynamo treats strings as
            constants, and operators accept them.
    """

    num_query_blocks: int
    num_key_blocks: int
    query_block: int
    key_block: int
    bits: str

    option = "block_mask"
    by_position = True
    # A positional mask (:class:`~para_core.attention.tiles.PositionalMask`) without causal tiles.
    is_causal = False

    @property
    def mask(self) -> BlockMask:  # type: ignore[override]
        """The mask by position of every call: this one."""
        return self

    @property
    def rows(self) -> tuple[int, ...]:
        return _read_rows(self.bits)

    @property
    def fields(self) -> tuple[int, int, int, int, str]:
        """The arguments of the constructor, for the JSON form of the options."""
        return self.num_query_blocks, self.num_key_blocks, self.query_block, self.key_block, self.bits

    def style_of(self, chosen: type[RingStyle]) -> type[RingStyle]:
        """Return the ring that sends a block only to ranks that see it, in place of ``chosen``.

        A style in which every rank gets all keys stays.
        """
        if chosen.has_all_keys:
            return chosen
        # Not at the top, because it imports this module.
        from para_core.attention.direct_ring import DirectRing

        return DirectRing

    @property
    def record(self) -> object:
        """A checksum, which ranks compare and show: the mask itself may be large."""
        return f"with checksum {crc32(repr(self.fields).encode()):08x}"

    def runs_seen(self, row: int) -> list[Run]:
        """Return the positions of the keys that query block ``row`` sees, as ascending runs ``(start,
        length)``.

        The last run may go past the end of the sequence, because it consists of whole blocks.
        """
        bits, runs, block = self.rows[row], [], 0
        while bits:
            hidden = (bits & -bits).bit_length() - 1
            bits >>= hidden
            visible = (~bits & (bits + 1)).bit_length() - 1
            runs.append(((block + hidden) * self.key_block, visible * self.key_block))
            bits >>= visible
            block += hidden + visible
        return runs

    def query_edges(self) -> list[int]:
        """Return the positions of queries at which the row of the mask changes."""
        rows = self.rows
        return [row * self.query_block for row in range(1, len(rows)) if rows[row] != rows[row - 1]]

    def key_edges(self) -> range:
        """Return the positions at which blocks of keys begin."""
        return range(0, self.num_key_blocks * self.key_block, self.key_block)

    def tile(self, queries: Run, keys: Sequence[Run]) -> list[tuple[list[Run], bool]]:
        """Return the keys that a run of queries with equal rows of the mask sees, as one tile; nothing if it
        sees none.

        >>> BlockMask(2, 3, 4, 2, "5,2").tile((0, 4), [(1, 5)])
        [([(1, 1), (4, 2)], False)]
        """
        seen = intersect(keys, self.runs_seen(queries[0] // self.query_block))
        if not seen:
            return []
        return [(seen, False)]

    def sees_any(self, queries: Iterable[Run], keys: Iterable[Run]) -> bool:
        """Whether any of the ``queries`` sees any of the ``keys``.
        Both are positions, as runs ``(start, length)``.
        """
        key_blocks = 0
        for first, last in _overlapped_blocks(keys, self.key_block):
            key_blocks |= (1 << (last + 1)) - (1 << first)
        rows = self.rows
        return any(
            rows[row] & key_blocks
            for first, last in _overlapped_blocks(queries, self.query_block)
            for row in range(first, last + 1)
        )

    def check_lengths(self, num_queries: int, num_keys: int) -> None:
        """Raise ``ValueError`` unless the mask has one block per ``query_block`` queries and per ``key_block`` keys."""
        num_blocks = (self.num_query_blocks, self.num_key_blocks)
        expected = (-(-num_queries // self.query_block), -(-num_keys // self.key_block))
        if num_blocks != expected:
            raise ValueError(
                f"block_mask has {num_blocks[0]} × {num_blocks[1]} blocks of {self.query_block} × {self.key_block} "
                f"tokens; expected {expected[0]} × {expected[1]} for {num_queries} queries and {num_keys} keys."
            )


def _overlapped_blocks(runs: Iterable[Run], block: int) -> list[tuple[int, int]]:
    """Return ``(first, last)`` for each non-empty run: the first and last block of ``block`` tokens it overlaps."""
    return [(start // block, (start + length - 1) // block) for start, length in runs if length]


def read_block_mask(block_mask: Tensor, block_size: int | tuple[int, int]) -> BlockMask:
    """Convert a user's tensor to a :class:`BlockMask`.

    Args:
        block_mask: Bool ``[query blocks, key blocks]``; True for blocks that are computed. If it is not on
            the CPU, the host waits for a copy.
        block_size: Tokens per block of queries and of keys, or a pair ``(of queries, of keys)``.

    Raises:
        TypeError, ValueError: An argument has a wrong type, layout, dtype or shape.
        RuntimeError: The call is inside a compiled function.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "make a BlockSparseAttnMode outside of the compiled function: its mask is read when it is made."
        )
    if isinstance(block_size, tuple):
        sizes = block_size
    else:
        sizes = (block_size, block_size)
    if len(sizes) != 2 or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise ValueError(
            f"block_size is {block_size!r}; expected a positive number of tokens, or one of queries and one of keys."
        )
    if not isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; expected a bool tensor.")
    if block_mask.layout != torch.strided or block_mask.is_nested:
        raise ValueError(
            "block_mask is a sparse or nested tensor; expected a dense one, such as block_mask.to_dense()."
        )
    if block_mask.dtype != torch.bool or block_mask.ndim != 2:
        raise ValueError(
            f"block_mask is {block_mask.dtype} {list(block_mask.shape)}; expected torch.bool [blocks of queries, "
            "blocks of keys], the same for all heads and samples."
        )
    rows = [sum(1 << column for column, visible in enumerate(row) if visible) for row in block_mask.tolist()]
    bits = ",".join([f"{row:x}" for row in rows])
    return BlockMask(block_mask.shape[0], block_mask.shape[1], sizes[0], sizes[1], bits)


@lru_cache(maxsize=64)
def _read_rows(bits: str) -> tuple[int, ...]:
    return tuple(int(row, 16) for row in bits.split(",") if row)
