"""The exchange between ranks at the start of an eager attention call.

Ranks compare what must be equal on all of them (:func:`call_signature`), and send each other what may differ:
the size and the properties of their mask (:class:`MaskRecord`). From this all ranks draw the same conclusion
(:func:`settle_masks`): an error, or which mask each rank uses. A conclusion must follow from the records of
all ranks alone, never from this rank's tensors: otherwise one rank would raise and the others wait for it in
a collective.

:class:`~para_core.attention.mesh_attention.MeshAttention` calls these functions, except in a graph or with
``assume_equal``, where ranks exchange nothing. The modes use the error messages. Tests:
tests/attention/test_inputs.py, tests/attention/test_mask_rows.py, tests/modes/test_unified.py,
tests/modes/test_transformers_models.py (:func:`warn_of_single_tokens`) and tests/test_bad_input.py
(:func:`explain_difference`, :func:`difference_of_lengths`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from para_core.attention.mask_rows import (
    COLUMNS_SHARDED,
    HIDES,
    ROWS_EQUAL,
    ROWS_SHARDED,
    check_rows,
    describe_rows,
)
from para_core.attention.masks import MaskExtents, infer_mask_extents
from para_core.attention.sdpa_call import MASK_DTYPES
from para_core.attention.spec import AttentionSpec
from para_core.distributed.agree import agree, exchange
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.records import Record, Signature, describe_first_difference
from para_core.layout.sequence import SequenceLayout

logger = logging.getLogger(__name__)

EQUAL_PARTS = (
    "Lengths are taken from cp.shard(...) or an explicit SequenceLayout; where neither was used, every rank is assumed "
    "to hold an equal part. Shard with x = cp.shard(x, dim=...), or pass layout=SequenceLayout(...)."
)


def call_signature(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, attn_func_learns: bool
) -> Signature:
    """Return a comparable record of what must be equal on all ranks, without the mask. The backend of local
    attention is not among it: ranks may compute their part in different ways. ``attn_func_learns`` says
    whether a user's function runs with gradients enabled, which decides what is rounded for sending.
    """
    tensors = {"query": query, "key": key, "value": value}
    return Signature.of(
        {
            **{f"{name} without its length": [*x.shape[:-2], x.shape[-1]] for name, x in tensors.items()},
            "query lengths per rank": spec.query_layout.sizes(),
            "key lengths per rank": spec.key_layout.sizes(),
            # All ranks must need the same gradients, because the backward has collectives that every rank
            # must run. Before the dtype, which may differ because of them (MeshAttention._needs_float32).
            "requires_grad": [torch.is_grad_enabled() and x.requires_grad for x in tensors.values()],
            "gradients of attn_func": attn_func_learns,
            "dtype": str(query.dtype),
            "device type": query.device.type,
            "is_causal": spec.is_causal,
            "scale": spec.scale,
            **spec.options.records,
            "rotate_method": spec.options.rotate_method,
        }
    )


def explain_difference(mesh: SequenceMesh, mask: Tensor | None, records: list[Record]) -> str:
    """Return an error message on how the calls of the ranks differ. Collective: ranks exchange their mask
    shapes, which the message names if only some of them have a mask.
    """
    shape = None
    if mask is not None:
        shape = [*mask.shape]
    masks = [record["mask"] for record in exchange({"mask": shape}, mesh)]
    field = next(field for record in records for field, value in record.items() if value != records[0][field])
    some_are_absent = None in masks and any(shape is not None for shape in masks)
    if field == "is_causal" and some_are_absent:
        # Models of transformers pass is_causal=True where they leave the mask out.
        return f"{_describe_different_masks(masks)} They also disagree about is_causal."
    if field == "is_causal":
        lengths = records[0]["query lengths per rank"]
        return (
            f"{describe_first_difference(records)} They hold {lengths} queries. Some models (all of Hugging Face "
            "transformers) pass is_causal=False for a single token. Use fewer ranks or longer inputs, pass the model a "
            "4-D mask over all tokens, sharded by rows (cp.shard(mask, dim=-2)), or use propose_plan."
        )
    difference = difference_of_lengths(records)
    if some_are_absent:
        # A rank may need none, so this need not be the fault. But the dtype may differ because of a mask with
        # a gradient (MeshAttention._needs_float32).
        return f"{difference} Masks: {_list_masks(masks)}."
    return difference


def difference_of_lengths(records: list[Record]) -> str:
    """Return an error message that names the first field in which ranks differ, and for lengths says what to do."""
    field = next(field for record in records for field, value in record.items() if value != records[0][field])
    if "lengths" not in field:
        return describe_first_difference(records)
    # Show only the length that each rank holds itself. Its record also contains lengths that it assumed for
    # others.
    lengths = [record[field][rank] for rank, record in enumerate(records)]
    return f"the ranks disagree about {field}: they hold {lengths}. {EQUAL_PARTS}"


def _describe_different_masks(masks: Sequence[Sequence[int] | str | None]) -> str:
    return (
        f"the ranks disagree about attn_mask: {_list_masks(masks)}. A model that builds its own mask may leave "
        "it out where this rank's tokens need none (no padding among them, or consecutive position_ids). Pass the "
        "model a 4-D mask over all tokens, sharded by rows (cp.shard(mask, dim=-2)); for position_ids that are not "
        "consecutive, an attention_mask of ones for this rank's tokens."
    )


def _list_masks(masks: Sequence[Sequence[int] | str | None]) -> str:
    shapes = ["none" if shape is None else shape for shape in masks]
    return ", ".join([f"rank {rank} {shape}" for rank, shape in enumerate(shapes)])


# Bits of MaskRecord.flags, from the lowest: 7 for the dtype of the mask (its position in MASK_DTYPES, from 1
# on), 1 for its requires_grad, then one for each leading dim, set if its size is not 1; from bit 48 what
# describe_rows says about its rows. So a query may have 40 leading dims; the sign bit stays 0.
_DTYPE_BITS, _ROWS_SHIFT = 8, 48


class MaskRecord(NamedTuple):
    """The facts about its mask that a rank sends to the others, as three integers (``MOST_NUMBERS`` of agree.py)."""

    rows: int  # Number of rows of the mask; -1 without a mask.
    columns: int  # Number of columns of the mask; -1 without a mask.
    flags: int

    @property
    def mask_code(self) -> int:
        """The part of ``flags`` that describes the mask, as :func:`_mask_code` encodes it."""
        return self.flags & (1 << _ROWS_SHIFT) - 1

    @property
    def row_bits(self) -> int:
        """The bits that :func:`describe_rows` returned for the mask."""
        return self.flags >> _ROWS_SHIFT


# The record of a rank whose call has no mask.
NO_MASK = MaskRecord(-1, -1, 0)


def _mask_code(mask: Tensor, num_leading: int) -> int:
    """Encode the dtype, the ``requires_grad`` and the leading dims of ``mask`` as one integer, which ranks
    compare.

    Each of the ``num_leading`` leading dims of the query has a bit, which is 0 if the size of the mask there
    is 1.
    """
    dtype = MASK_DTYPES.index(mask.dtype) + 1
    leading = [1] * (num_leading + 2 - mask.ndim) + [*mask.shape[:-2]]
    wide = sum([1 << dim for dim, size in enumerate(leading) if size != 1])
    learned = torch.is_grad_enabled() and mask.requires_grad
    return dtype | learned << _DTYPE_BITS - 1 | wide << _DTYPE_BITS


def _dtype_of(mask_code: int) -> torch.dtype:
    """Return the dtype that :func:`_mask_code` encoded in ``mask_code``."""
    number = mask_code & (1 << _DTYPE_BITS - 1) - 1
    return MASK_DTYPES[number - 1]


def _is_learned(mask_code: int) -> bool:
    """Whether :func:`_mask_code` encoded ``requires_grad`` in ``mask_code``."""
    return bool(mask_code >> _DTYPE_BITS - 1 & 1)


def _leading_sizes(mask_code: int, query: Tensor) -> list[int]:
    """Return the sizes of the leading dims that :func:`_mask_code` encoded in ``mask_code``: 1 or that of ``query``."""
    return [size if mask_code >> _DTYPE_BITS + dim & 1 else 1 for dim, size in enumerate(query.shape[:-2])]


def settle_masks(
    spec: AttentionSpec,
    mesh: SequenceMesh,
    query: Tensor,
    mask: Tensor | None,
    mask_records: Sequence[MaskRecord],
) -> tuple[Tensor | None, MaskExtents | None]:
    """Return the mask that this rank uses and the extents of its dims, derived from the ``mask_records`` of
    all ranks.

    Both are None if no rank has a mask. If this rank has none, but other ranks have masks that cover their
    own keys, this rank gets a mask that hides nothing. Each step gets the sizes that the one before left: first
    masks of padding, with equal rows, get one row, because the open mask of a rank without one has one row, too,
    and would else be refused beside them; only then do all ranks but those without queries have one row.

    Raises:
        ValueError: The masks of the ranks do not fit together, or nothing tells that the rows of a mask are
            those of its rank. Raised on every rank.
    """
    codes = {record.mask_code for record in mask_records if record.rows >= 0}
    if not codes:
        return None, None
    if len(codes) > 1:
        raise ValueError(
            "the ranks disagree about attn_mask: its dtype, requires_grad, or the dims before the last two. They hold "
            f"{_describe_masks(mask_records, query)}. Make these equal on every rank."
        )
    sizes = [(record.rows, record.columns) for record in mask_records]
    if _are_key_masks(mask_records, spec):
        sizes = [(min(rows, 1), columns) for rows, columns in sizes]
    sizes = _with_rows_of_idle_ranks(_with_open_masks(sizes, spec), spec)
    extents = infer_mask_extents(sizes, spec.query_layout, spec.key_layout, range(mesh.ranks))
    bits = [record.row_bits for record in mask_records]
    if extents == MaskExtents("local", "global"):
        check_rows(bits, [record.rows for record in mask_records], spec)
    rows, columns = sizes[mesh.rank]
    of_tokens = _extents_of_single_tokens(extents, bits, spec)
    # A rank without a token has none of the rows or columns that turned out to be local.
    if of_tokens.queries != extents.queries:
        rows = spec.query_layout.size(mesh.rank)
    if of_tokens.keys != extents.keys:
        columns = spec.key_layout.size(mesh.rank)
    return _of_size(mask, rows, columns, codes.pop(), query), of_tokens


def _of_size(mask: Tensor | None, rows: int, columns: int, code: int, query: Tensor) -> Tensor:
    """Return the first ``rows`` and ``columns`` of ``mask``, after a single row was expanded. Without a row, or
    without a mask, return one that hides nothing, with the dtype and leading dims that :func:`_mask_code`
    encoded in ``code``.
    """
    if mask is not None and rows > mask.shape[-2] == 1:
        mask = mask.expand(*mask.shape[:-2], rows, mask.shape[-1])
    if mask is not None and rows <= mask.shape[-2]:
        return mask[..., :rows, :columns]
    dtype = _dtype_of(code)
    shape = (*_leading_sizes(code, query), rows, columns)
    if dtype == torch.bool:
        return query.new_ones(shape, dtype=dtype)
    return query.new_zeros(shape, dtype=dtype).requires_grad_(_is_learned(code))


def _extents_of_single_tokens(extents: MaskExtents, bits: Sequence[int], spec: AttentionSpec) -> MaskExtents:
    """Return ``extents``, in which a dim of size 1 is local, and not broadcast, if no rank holds more than
    one token, and ``cp.shard`` made it or the other dim is global.

    In the latter case it may also be meant as broadcast, and the result is the same, because all ranks then
    have the same row or column.
    """
    may_be_rows = extents.keys == "global" or any(of_rank & ROWS_SHARDED for of_rank in bits)
    if may_be_rows and extents.queries == "broadcast" and _holds_single_tokens(spec.query_layout):
        return MaskExtents("local", extents.keys)
    may_be_columns = extents.queries == "global" or any(of_rank & COLUMNS_SHARDED for of_rank in bits)
    if may_be_columns and extents.keys == "broadcast" and _holds_single_tokens(spec.key_layout):
        return MaskExtents(extents.queries, "local")
    return extents


def _holds_single_tokens(layout: SequenceLayout) -> bool:
    """Whether the sequence has several tokens, and no rank holds more than one of them."""
    return layout.total > 1 and max(layout.sizes()) == 1


def warn_of_single_tokens(spec: AttentionSpec) -> None:
    """Log a warning if no rank holds more than one token, and the call would be causal in some models.

    A call is checked when it is prepared, so equal calls, such as those of later steps, do not warn again.
    """
    if spec.is_causal or spec.query_layout != spec.key_layout or not _holds_single_tokens(spec.query_layout):
        return
    logger.warning(
        "each rank holds at most one of %d tokens, and attention is called with is_causal=False: models of Hugging "
        "Face transformers call it so for a single token even if they are causal, and the result is then wrong. For "
        "such a model use fewer ranks or longer inputs, pass it a 4-D mask over all tokens (cp.shard(mask, dim=-2)), "
        "or use propose_plan.",
        spec.query_layout.total,
    )


def describe_mask(spec: AttentionSpec, mesh: SequenceMesh, query: Tensor, mask: Tensor) -> MaskRecord:
    """Return what this rank sends to the others about its ``mask``. Collective only if it raises.

    Raises:
        RuntimeError: The device of this rank failed. Raised on every rank.
    """
    try:
        bits = describe_rows(mask, spec.query_layout, spec.key_layout, mesh.rank)
    except RuntimeError as error:
        agree(error, mesh)
        raise
    rows, columns = mask.shape[-2:]
    return MaskRecord(rows, columns, _mask_code(mask, query.ndim - 2) | bits << _ROWS_SHIFT)


def _describe_masks(mask_records: Sequence[MaskRecord], query: Tensor) -> str:
    texts = []
    for record in mask_records:
        if record.rows < 0:
            texts.append("none")
            continue
        shape = [*_leading_sizes(record.mask_code, query), record.rows, record.columns]
        learned = ""
        if _is_learned(record.mask_code):
            learned = " with requires_grad"
        texts.append(f"{shape} of {_dtype_of(record.mask_code)}{learned}")
    return "; ".join([f"rank {rank}: {text}" for rank, text in enumerate(texts)])


def _are_key_masks(mask_records: Sequence[MaskRecord], spec: AttentionSpec) -> bool:
    """Whether the masks of all ranks are key masks, and not parts of a larger mask that was cut along both
    dims. Each mask of several rows must have equal rows and a column per key of its rank, and one of these
    masks must hide a key.
    """
    sizes_of_ranks = zip(spec.query_layout.sizes(), spec.key_layout.sizes(), strict=True)
    return all(
        record.rows in (-1, 1) or ((record.rows, record.columns) == sizes and record.row_bits & ROWS_EQUAL)
        for record, sizes in zip(mask_records, sizes_of_ranks, strict=True)
    ) and any(record.rows > 1 and record.row_bits & HIDES for record in mask_records)


def _with_open_masks(sizes: list[tuple[int, int]], spec: AttentionSpec) -> list[tuple[int, int]]:
    """Return the mask sizes of all ranks, where a rank without a mask, if there is one, gets ``(1, its number of
    keys)``.

    Raises:
        ValueError: Other masks do not have this form, or the call is causal, so the missing mask cannot be
            guessed.
    """
    if all(rows >= 0 for rows, _ in sizes):
        return sizes
    num_keys = spec.key_layout.sizes()
    fits = all(
        rows in (-1, 0, 1) and columns in (-1, num_keys[rank]) for rank, (rows, columns) in enumerate(sizes)
    )
    if not fits or max(num_keys) < 2 or spec.key_layout.sharded == () or spec.is_causal:
        shapes = [None if rows < 0 else f"[..., {rows}, {columns}]" for rows, columns in sizes]
        raise ValueError(_describe_different_masks(shapes))
    return [
        (1, num_keys[rank]) if rows < 0 else (rows, columns) for rank, (rows, columns) in enumerate(sizes)
    ]


def _with_rows_of_idle_ranks(sizes: list[tuple[int, int]], spec: AttentionSpec) -> list[tuple[int, int]]:
    """Return the mask sizes of all ranks, in which masks of one row agree with the mask of a rank without
    queries: a mask of keys that was expanded to its queries has no row there.
    """
    num_queries, keys = spec.query_layout.sizes(), spec.key_layout
    idle = [rank for rank, (rows, _) in enumerate(sizes) if rows == 0 and num_queries[rank] == 0]
    if not idle or any(rows != 1 for rank, (rows, _) in enumerate(sizes) if rank not in idle):
        return sizes
    if any(0 < sizes[rank][1] == keys.size(rank) < keys.total for rank in idle):
        # The columns are for the rank's own keys, and without a row nobody knows which of them it hides.
        return sizes
    if all(number <= 1 for number in num_queries):
        # If every rank holds at most one query, a mask of one row may be meant for all queries or for that
        # one only. The sizes do not tell which, so change nothing.
        return sizes
    if all(sizes[rank][1] == 0 for rank in idle):
        # These ranks have no keys either. With one row on all ranks they get the columns of the others.
        return [(1, columns) for _, columns in sizes]
    # They may compute some heads of the queries of others, so these send a row with each query.
    return [(number, columns) for number, (_, columns) in zip(num_queries, sizes, strict=True)]
