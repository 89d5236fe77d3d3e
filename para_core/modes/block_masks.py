"""Shard a ``BlockMask`` of flex attention: build the mask of the query rows that one rank computes.

``flex_attention`` compares a mask's lengths with those of its query and key before any mode sees the call. A
sharded mask therefore reports the lengths of this rank's query and key. Its blocks, however, cover all query
rows that the rank computes after the Ulysses exchange, and all keys of the sequence.

:mod:`.flex_attention` registers :func:`shard_block_mask`, which ``cp.shard`` and the rule ``SplitMask`` of
plans call. Sharding needs no communication. Tests: tests/modes/test_flex_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.attention.flex_exchange import query_rows
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Run, SequenceLayout

MaskMod = Callable[..., Tensor]
# The size of the single block of the mask that flex_attention creates if a call has none: torch's
# _LARGE_SPARSE_BLOCK_SIZE.
_NO_BLOCKS = 1 << 30


class ShardedMaskMod:
    """The ``mask_mod`` of a sharded mask. It also stores the layouts, because the operator of flex attention
    gets no other attributes of a ``BlockMask``.

    Calling the object raises RuntimeError: a call means that neither a mode nor a plan has intercepted
    ``flex_attention``.

    Args:
        local_mask_mod: The ``mask_mod(b, h, row, key)`` that the operator uses on this rank. ``row`` is an
            index into the query that :func:`~para_core.attention.flex_exchange.enter` returns, ``key`` one
            into all keys.
        layout_ids: The :func:`layout_id` of the query layout and of the key layout; (0, 0) if the mask was
            sharded inside a graph, where the layouts themselves are compared.
    """

    def __init__(
        self,
        local_mask_mod: MaskMod,
        query_layout: SequenceLayout,
        key_layout: SequenceLayout,
        layout_ids: tuple[int, int],
    ) -> None:
        self.local_mask_mod = local_mask_mod
        self.query_layout = query_layout
        self.key_layout = key_layout
        self.layout_ids = layout_ids

    def __call__(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "this BlockMask was sharded with cp.shard, and flex_attention was called where no mode or plan intercepts "
            "it. Call it inside the mode that sharded the mask, or pass the mask over all tokens."
        )


def has_no_blocks(row_block: int, key_block: int) -> bool:
    """Whether a mask with blocks of this size consists of its ``mask_mod`` alone, which gets positions in the
    sequence. Nobody compares the lengths of such a mask with those of a call.
    """
    return row_block >= _NO_BLOCKS and key_block >= _NO_BLOCKS


def placement_of(layout: SequenceLayout) -> list[tuple[int, bool, bool, int]]:
    """Return what decides which tokens each rank holds: all of each segment but its name."""
    return [
        (segment.total, segment.replicated, segment.balanced, segment.together) for segment in layout.segments
    ]


def layout_id(layout: SequenceLayout) -> int:
    """Return a hash of the ranks and the placement of ``layout``, from 0 to 2³¹ - 2, equal on all ranks. The
    multiplier and the modulus are primes, so that layouts with similar numbers of tokens have different hashes.
    """
    number = layout.ranks
    for total, replicated, balanced, together in placement_of(layout):
        number = (number * 1000003 + 4 * total + 2 * replicated + balanced) * 1000003 + together
    return number % (2**31 - 1)


def shard_block_mask(
    mask: BlockMask, query_layout: SequenceLayout, key_layout: SequenceLayout, mesh: SequenceMesh
) -> BlockMask:
    """Return this rank's part of ``mask``, to pass to ``flex_attention`` with this rank's query and key;
    ``mask`` itself if it has no blocks.

    Raises:
        ValueError: ``mask`` was already sharded, or its lengths differ from those of the layouts.
    """
    if has_no_blocks(*mask.BLOCK_SIZE):
        return mask
    totals = query_layout.total, key_layout.total
    if isinstance(mask.mask_mod, ShardedMaskMod):
        raise ValueError("block_mask was sharded before; pass the mask over all tokens.")
    if (mask.seq_lengths[0], mask.seq_lengths[1]) != totals:
        raise ValueError(
            f"block_mask is over {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys; expected all "
            f"{totals[0]} and {totals[1]} tokens of their sequences. Make it with create_block_mask(..., "
            f"Q_LEN={totals[0]}, KV_LEN={totals[1]})."
        )
    # If the keys are replicated, there is no Ulysses exchange, and a rank computes only the rows of its own
    # tokens.
    mesh_of_queries = mesh
    if not key_layout.sharded:
        mesh_of_queries = mesh.single_rank()
    mask_mod, partial, full = _restrict(mask, query_rows(query_layout, mesh_of_queries))
    ids = (0, 0)
    if not torch.compiler.is_compiling():
        ids = (layout_id(query_layout), layout_id(key_layout))
    size = query_layout.size(mesh.rank)
    sharded = BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=ShardedMaskMod(mask_mod, query_layout, key_layout, ids),
        # Pass the length of all keys, because torch 2.15 derives the number of key blocks from this length.
        seq_lengths=(size, mask.seq_lengths[1]),
        compute_q_blocks=mask.q_indices is not None,
    )
    # Report the lengths of this rank's parts, because flex_attention compares seq_lengths with its query and
    # key.
    sharded.seq_lengths = size, key_layout.size(mesh.rank)
    return sharded


def _restrict(
    mask: BlockMask, rows: Sequence[Run]
) -> tuple[MaskMod, tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Return the ``mask_mod``, the partial blocks and the full blocks of ``mask``, restricted to the query
    ``rows``.

    The blocks are given as numbers and indices, as in a ``BlockMask``. ``rows`` are ascending runs ``(start,
    length)``.
    """
    full_numbers = mask.full_kv_num_blocks
    full_indices = mask.full_kv_indices
    num_rows = sum([length for _, length in rows])
    if len(rows) == 1 and num_rows == mask.seq_lengths[0]:
        return mask.mask_mod, (mask.kv_num_blocks, mask.kv_indices), (full_numbers, full_indices)
    row_block, key_block = mask.BLOCK_SIZE
    columns = -(-mask.seq_lengths[1] // key_block)
    partial = _as_table(mask.kv_num_blocks, mask.kv_indices, columns)
    full = torch.zeros_like(partial)
    if full_numbers is not None and full_indices is not None:
        full = _as_table(full_numbers, full_indices, columns)
    mod_of_all_rows = mask.mask_mod
    position = position_of_row(rows, partial.device)
    indices = torch.arange(num_rows, device=partial.device)
    positions = position(indices)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mod_of_all_rows(b, h, position(q), k)

    aligned = len(rows) == 1 and rows[0][0] % row_block == 0
    restricted_mod: MaskMod = mask_mod
    if not aligned:
        restricted_mod = _keep_blocks(mask_mod, partial.int() + 2 * full, positions, mask.BLOCK_SIZE)
    # touched[i, j] is 1 if row block i of the restricted mask contains a row of row block j of the whole
    # mask.
    number = max(1, -(-num_rows // row_block))
    touched = torch.zeros(number, partial.shape[-2], device=partial.device)
    touched[indices // row_block, positions // row_block] = 1.0
    some = touched @ (partial | full).float() > 0
    all_full = torch.zeros_like(some)
    if num_rows:
        all_full = touched @ (~full).float() == 0
    partial_blocks = _to_block_indices(some & ~all_full)
    if full_numbers is None:
        return restricted_mod, partial_blocks, (None, None)
    return restricted_mod, partial_blocks, _to_block_indices(some & all_full)


def _as_table(numbers: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return a bool tensor ``[B, H, blocks of queries, columns]`` that is True at the given blocks."""
    # In each row of ``indices`` only the first ``numbers`` entries are defined. Map the other entries to an
    # extra last column, and drop this column from the result.
    valid = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    positions = torch.where(valid, indices, columns).long()
    table = torch.zeros(*numbers.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, positions, torch.ones_like(positions, dtype=torch.bool))[..., :columns]


def _to_block_indices(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``kv_num_blocks`` and ``kv_indices`` of a ``BlockMask`` whose blocks are the True entries of ``table``."""
    numbers = table.sum(-1, dtype=torch.int32)
    indices = table.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers, indices


def position_of_row(rows: Sequence[Run], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from the index of a query row on this rank to its position in the sequence. ``rows``
    are the positions of this rank's rows, as ascending runs ``(start, length)``.
    """
    if len(rows) <= 1:
        start = 0
        if rows:
            start = rows[0][0]
        return lambda q: q + start
    positions = torch.cat([torch.arange(start, start + length, device=device) for start, length in rows])
    return lambda q: positions[q]


def _keep_blocks(mask_mod: MaskMod, table: Tensor, positions: Tensor, block_size: tuple[int, int]) -> MaskMod:
    """Return a ``mask_mod`` that gives what the kernel makes of the blocks of the whole mask in ``table``.

    A row block of this rank may contain rows of several row blocks of the whole mask, and the kernel
    evaluates ``mask_mod`` in each key block that any of these rows sees in part. Rows to which that block is
    hidden must not see it, and rows to which it is full see all of it: there the kernel never asks ``mask_mod``,
    which may say otherwise, if the mask was made by hand or from the first head alone (``H=None``).

    Args:
        table: ``[B or 1, H or 1, row blocks, key blocks]``: 0 for a hidden block, 1 for a partial one, 2 or
            more for a full one.
        positions: ``[rows]``, the position in the sequence of each query row of this rank.
        block_size: The numbers of rows and of keys in a block.
    """
    batch, heads = table.shape[:2]
    row_block, key_block = block_size

    def mask_mod_of_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A table with one sample or one head is valid for all of them.
        of_batch = b
        if batch <= 1:
            of_batch = b * 0
        of_head = h
        if heads <= 1:
            of_head = h * 0
        kind = table[of_batch, of_head, positions[q] // row_block, k // key_block]
        return (kind > 1) | ((kind > 0) & mask_mod(b, h, q, k))

    return mask_mod_of_blocks
