"""A ``BlockMask`` of flex attention over all tokens, made into that of the rows that one rank computes.

``flex_attention`` compares a mask's lengths with those of its query and key before any mode sees the call. So a sharded
mask states this rank's lengths, while its blocks are those of all rows that the rank's ring block computes, over all
keys of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.attention.flex_exchange import query_rows
from para_core.distributed.layout import Run, SequenceLayout
from para_core.distributed.mesh import SequenceMesh

MaskMod = Callable[..., Tensor]


class ShardedMaskMod:
    """The ``mask_mod`` of a sharded mask: what a mode needs to know of it, since flex attention hands on nothing else.

    Args:
        of_rows: ``(b, h, row, key)``, with rows counted among those that
            :func:`~para_core.attention.flex_exchange.enter` gives.
        layout_ids: of :func:`layout_id`, of the queries and of the keys.
    """

    def __init__(
        self, of_rows: MaskMod, query_layout: SequenceLayout, key_layout: SequenceLayout, layout_ids: tuple[int, int]
    ) -> None:
        self.of_rows = of_rows
        self.query_layout, self.key_layout = query_layout, key_layout
        self.layout_ids = layout_ids

    def __call__(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "this BlockMask was sharded with cp.shard, and flex_attention was called where no mode or plan intercepts "
            "it. Call it "
            "inside the mode that sharded the mask, or pass the mask over all tokens."
        )


def is_sharded(mask: BlockMask) -> bool:
    return isinstance(mask.mask_mod, ShardedMaskMod)


def layout_id(layout: SequenceLayout) -> int:
    """Return a number from 0 to 2³¹ - 2 that differs between layouts."""
    number = layout.ranks
    for segment in layout.segments:
        kind = 2 * segment.replicated + segment.balanced
        number = (number * 1000003 + 4 * segment.total + kind) * 1000003 + segment.together
    return number % (2**31 - 1)


def shard_block_mask(
    mask: BlockMask, query_layout: SequenceLayout, key_layout: SequenceLayout, mesh: SequenceMesh
) -> BlockMask:
    """Return the rows of ``mask`` that this rank computes, as a mask for this rank's query and key.

    Args:
        mask: over all tokens of ``query_layout`` and ``key_layout``.

    Raises:
        ValueError: ``mask`` was sharded before, or has other lengths.
    """
    totals = query_layout.total, key_layout.total
    if is_sharded(mask):
        raise ValueError("block_mask was sharded before; pass the mask over all tokens.")
    if (mask.seq_lengths[0], mask.seq_lengths[1]) != totals:
        raise ValueError(
            f"block_mask is over {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys; expected all "
            f"{totals[0]} and "
            f"{totals[1]} tokens of their sequences. Make it with create_block_mask(..., Q_LEN={totals[0]}, "
            f"KV_LEN={totals[1]})."
        )
    # Keys that every rank holds are attended to without an exchange: then a rank's rows are its own tokens.
    rows = query_rows(query_layout, mesh if key_layout.sharded else mesh.alone())
    blocks = _Blocks(mask, rows)
    ids = (0, 0) if torch.compiler.is_compiling() else (layout_id(query_layout), layout_id(key_layout))
    size = query_layout.size(mesh.rank)
    sharded = BlockMask.from_kv_blocks(
        blocks.partial[0],
        blocks.partial[1],
        blocks.full[0],
        blocks.full[1],
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=ShardedMaskMod(blocks.mask_mod, query_layout, key_layout, ids),
        # All keys: torch 2.15 takes the number of columns from here, and the blocks have the columns of all.
        seq_lengths=(size, mask.seq_lengths[1]),
        compute_q_blocks=mask.q_indices is not None,
    )
    # flex_attention compares these with the query and the key that it is given, which are this rank's.
    sharded.seq_lengths = size, key_layout.size(mesh.rank)
    return sharded


class _Blocks:
    """Blocks and ``mask_mod`` of some rows of a mask.

    Args:
        rows: their positions, ascending.
    """

    def __init__(self, mask: BlockMask, rows: Sequence[Run]) -> None:
        self.mask_mod: MaskMod = mask.mask_mod
        self.partial = mask.kv_num_blocks, mask.kv_indices
        self.full: tuple[Tensor | None, Tensor | None] = mask.full_kv_num_blocks, mask.full_kv_indices
        num_rows = sum([length for _, length in rows])
        if len(rows) == 1 and num_rows == mask.seq_lengths[0]:
            return
        row_block, key_block = mask.BLOCK_SIZE
        columns = -(-mask.seq_lengths[1] // key_block)
        partial, full = _dense(mask, columns)
        positions = positions_of(rows, partial.device)
        aligned = len(rows) == 1 and rows[0][0] % row_block == 0
        of_positions = _at_positions(mask.mask_mod, rows, positions)
        self.mask_mod = (
            of_positions if aligned else _and_blocks(of_positions, partial | full, positions, mask.BLOCK_SIZE)
        )
        # Which blocks of rows of the whole mask each block of these rows touches.
        number = max(1, -(-num_rows // row_block))
        touched = torch.zeros(number, partial.shape[-2], device=partial.device)
        touched[torch.arange(num_rows, device=partial.device) // row_block, positions // row_block] = 1.0
        some = touched @ (partial | full).float() > 0
        all_full = touched @ (~full).float() == 0 if num_rows else torch.zeros_like(some)
        self.partial = _ordered(some & ~all_full)
        if mask.full_kv_num_blocks is not None:
            self.full = _ordered(some & all_full)


def _dense(mask: BlockMask, columns: int) -> tuple[Tensor, Tensor]:
    """Return which blocks need ``mask_mod``, and which are fully visible: two bool tensors
    ``[B, H, blocks of queries, blocks of keys]``.
    """
    partial = _as_table(mask.kv_num_blocks, mask.kv_indices, columns)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _as_table(mask.full_kv_num_blocks, mask.full_kv_indices, columns)


def _as_table(numbers: Tensor, indices: Tensor, columns: int) -> Tensor:
    # Entries behind the number of blocks of a row are undefined: these go to a column that is cut off.
    valid = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    places = torch.where(valid, indices, columns).long()
    table = torch.zeros(*numbers.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, places, torch.ones_like(places, dtype=torch.bool))[..., :columns]


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table of blocks as the numbers and indices of a ``BlockMask``."""
    numbers = table.sum(-1, dtype=torch.int32)
    indices = table.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers, indices


# -- indices


def positions_of(rows: Sequence[Run], device: torch.device) -> Tensor:
    """Return the position in the sequence of each row, as int64."""
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in rows])


def _at_positions(mask_mod: MaskMod, rows: Sequence[Run], positions: Tensor) -> MaskMod:
    if len(rows) == 1:
        start = rows[0][0]
        return lambda b, h, q, k: mask_mod(b, h, q + start, k)
    return lambda b, h, q, k: mask_mod(b, h, positions[q], k)


def _and_blocks(mask_mod: MaskMod, table: Tensor, positions: Tensor, block_size: tuple[int, int]) -> MaskMod:
    """``mask_mod`` where ``table`` has the block, in terms of the whole mask's blocks.

    A block of these rows may touch several blocks of the whole mask. A kernel then asks ``mask_mod`` about all keys
    that any of them has, also about keys that one of them leaves out.
    """
    batch, heads = table.shape[:2]
    row_block, key_block = block_size

    def masked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_batch, of_head = b if batch > 1 else b * 0, h if heads > 1 else h * 0
        return mask_mod(b, h, q, k) & table[of_batch, of_head, positions[q] // row_block, k // key_block]

    return masked
