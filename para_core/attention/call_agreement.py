"""The exchange at the start of an eager attention call: what must be equal on all ranks, and what each rank states
about its part.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from para_core.attention.local_rows import (
    EQUAL,
    HIDES,
    LOWER,
    SHOWS,
    MaskReviews,
    Review,
    needs_review,
    num_common_rows,
    require_own_rows,
)
from para_core.attention.mask import MaskExtents, mask_extents
from para_core.attention.spec import AttentionSpec
from para_core.distributed.consistency import Record, Signature, check_consistent, exchange, first_difference, signature
from para_core.distributed.layout import SequenceLayout
from para_core.distributed.mesh import SequenceMesh
from para_core.torch_internals import innermost_transform

logger = logging.getLogger(__name__)

EQUAL_PARTS = (
    "Lengths are taken from cp.shard(...) or an explicit SequenceLayout; where neither was used, every rank is assumed "
    "to hold an equal part. Shard with x = cp.shard(x, dim=...), or pass layout=SequenceLayout(...)."
)


# -- what must be equal


def call_signature(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Signature:
    """Return the signature of everything except the mask that must be equal on all ranks."""
    tensors = {"query": query, "key": key, "value": value}
    options = spec.options
    blocks = options.block_mask
    return signature(
        {
            **{f"{name} without its length": [*x.shape[:-2], x.shape[-1]] for name, x in tensors.items()},
            "query lengths per rank": spec.query_layout.sizes(),
            "key lengths per rank": spec.key_layout.sizes(),
            "dtype": str(query.dtype),
            "device type": query.device.type,
            "is_causal": spec.is_causal,
            "scale": spec.scale,
            "block_mask": None if blocks is None else f"with checksum {crc32(repr(blocks.fields).encode()):08x}",
            "kept keys": None if options.kept_keys is None else [*options.kept_keys.fields],
            "comm_dtype": str(options.comm_dtype),
            "ulysses_chunks": options.ulysses_chunks,
            "rotate_method": options.rotate_method,
            # The backward has collectives of its own, which every rank must run.
            "requires_grad": [torch.is_grad_enabled() and x.requires_grad for x in tensors.values()],
        }
    )


def explain_difference(mesh: SequenceMesh, mask: Tensor | None, records: list[Record]) -> str:
    """Return an error message that says how the calls of the ranks differ. Collective: it also exchanges the shapes of
    the masks.
    """
    masks = [record["mask"] for record in exchange({"mask": None if mask is None else [*mask.shape]}, mesh)]
    field = next(field for record in records for field, value in record.items() if value != records[0][field])
    if None in masks and any(shape is not None for shape in masks):
        return f"{_masks_differ(masks)} They also disagree about {field}."
    if "lengths" in field:
        # The length that each rank holds itself says more than the lengths that it assumed for the others.
        held = [record[field][rank] for rank, record in enumerate(records)]
        return f"the ranks disagree about {field}: they hold {held}. {EQUAL_PARTS}"
    if field == "is_causal":
        lengths = records[0]["query lengths per rank"]
        return (
            f"{first_difference(records)} They hold {lengths} queries. Some models (all of Hugging Face transformers) "
            "pass is_causal=False for a single token. Use fewer ranks or longer inputs, pass the model a 4-D mask "
            "over all tokens, sharded by rows (cp.shard(mask, dim=-2)), or use propose_plan."
        )
    return first_difference(records)


def _masks_differ(masks: Sequence[Sequence[int] | str | None]) -> str:
    held = ", ".join([f"rank {rank} {'none' if shape is None else shape}" for rank, shape in enumerate(masks)])
    return (
        f"the ranks disagree about attn_mask: {held}. A model that builds its own mask may leave it out where this "
        "rank's tokens need none (no padding among them, or consecutive position_ids). Pass the model a 4-D mask over "
        "all tokens, sharded by rows (cp.shard(mask, dim=-2)); for position_ids that are not "
        "consecutive, an attention_mask of ones for this rank's tokens."
    )


# -- what each rank tells of its own part


class OwnPart(NamedTuple):
    """The statement of one rank about its part: five integers of 64 bits, as
    :func:`~para_core.distributed.consistency.check_consistent` exchanges them.
    """

    rows: int  # Of the mask; -1 without one.
    columns: int
    flags: int
    digest: int  # Of query and key, if the call asks whether every rank holds the same tokens; else 0.
    mask_digest: int  # Of the mask's rows, if the call asks whether they are this rank's; else 0.


# A call without a mask and without digests.
NO_MASK = OwnPart(-1, -1, 0, 0, 0)

# Layout of the flags: dtype and gradient of the mask, which of its leading dims are larger than 1, the review of its
# rows (48 bits up), and whether the calling module is causal.
_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_BITS, _REVIEW_SHIFT, _CAUSAL_CALLER = 8, 48, 1 << 56


def _mask_code(mask: Tensor, num_leading: int) -> int:
    """Return a number for the dtype, the gradient and the leading dims of ``mask``, broadcast to ``num_leading``
    leading dims.
    """
    dtype = _DTYPES.index(mask.dtype) + 1 if mask.dtype in _DTYPES else len(_DTYPES) + 1
    leading = [1] * (num_leading - max(mask.ndim - 2, 0)) + [*mask.shape[:-2]]
    wide = sum([1 << dim for dim, size in enumerate(leading) if size != 1])
    learned = torch.is_grad_enabled() and mask.requires_grad
    return dtype | learned << _DTYPE_BITS - 1 | wide << _DTYPE_BITS


_CODE = (1 << _REVIEW_SHIFT) - 1


def last_two(mask: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns of a mask, which may have fewer than two dims."""
    rows, columns = [1, 1, *mask.shape][-2:]
    return rows, columns


def settle_call(
    spec: AttentionSpec, mesh: SequenceMesh, query: Tensor, mask: Tensor | None, parts: Sequence[OwnPart]
) -> tuple[Tensor | None, MaskExtents | None]:
    """Return the mask of this rank and the extents of its dims, from what all ranks stated.

    A rank without a mask gets one that hides nothing, if the other ranks have a mask of their own keys.

    Raises:
        ValueError: The masks of the ranks do not fit together. Raised on every rank.
    """
    layout = spec.query_layout
    _require_no_copies(parts, spec)
    _require_causal_known(parts, layout)
    codes = {part.flags & _CODE for part in parts if part.rows >= 0}
    if not codes:
        return None, None
    sizes = [(part.rows, part.columns) for part in parts]
    if len(codes) > 1:
        raise ValueError(
            "the ranks disagree about attn_mask: its dtype, requires_grad, or the dims before the last two. They hold "
            f"{_texts(parts)}. Make these equal on every rank."
        )
    if _are_of_keys(parts, spec):
        sizes = [(min(rows, 1), columns) for rows, columns in sizes]
        mask = mask if mask is None else mask[..., :1, :]
    if any(part.rows < 0 for part in parts):
        sizes = _sizes_with_absent(sizes, spec)
        if mask is None:
            mask = _nothing_hidden(codes.pop(), query, sizes[mesh.rank])
    mask, sizes = _with_broadcast_rows(mask, sizes, layout, mesh.rank)
    extents = mask_extents(sizes, layout, spec.key_layout, range(mesh.ranks))
    mask, extents = _read_single_tokens(mask, extents, parts, spec, mesh.rank)
    if extents == MaskExtents("local", "global"):
        is_causal = any(part.flags & _CAUSAL_CALLER for part in parts)
        reviews = [Review(part.flags >> _REVIEW_SHIFT, part.mask_digest) for part in parts]
        require_own_rows(reviews, layout, is_causal=is_causal)
    return mask, extents


def own_part(
    spec: AttentionSpec,
    mesh: SequenceMesh,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    reviews: MaskReviews,
    *,
    look_for_copies: bool,
) -> OwnPart:
    """Return what this rank states about its part of a call.

    Args:
        look_for_copies: Whether to compute a digest of the tokens, to detect that every rank holds the same ones. Waits
            for the device.

    Raises:
        RuntimeError: The device of this rank failed. Raised on every rank.
    """
    try:
        return _own_part(spec, mesh, query, key, mask, reviews, look_for_copies=look_for_copies)
    except RuntimeError as error:
        check_consistent(error, mesh)
        raise


def _own_part(
    spec: AttentionSpec,
    mesh: SequenceMesh,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    reviews: MaskReviews,
    *,
    look_for_copies: bool,
) -> OwnPart:
    layout, flags, mask_digest = spec.query_layout, 0, 0
    rows, columns = (-1, -1) if mask is None else last_two(mask)
    shows_nothing = False
    if mask is not None:
        flags = _mask_code(mask, query.ndim - 2)
        if needs_review(mask, layout, spec.key_layout, mesh.rank):
            bits, mask_digest = reviews.of(mask, num_common_rows(layout))
            flags |= bits << _REVIEW_SHIFT
            shows_nothing = bits & (LOWER | SHOWS) == LOWER
    if not spec.is_causal and (shows_nothing or has_single_tokens(layout)) and _is_causal_caller():
        flags |= _CAUSAL_CALLER
    return OwnPart(rows, columns, flags, _digest(query, key) if look_for_copies else 0, mask_digest)


def _texts(parts: Sequence[OwnPart]) -> str:
    texts = []
    for part in parts:
        if part.rows < 0:
            texts.append("none")
            continue
        code = (part.flags & (1 << _DTYPE_BITS - 1) - 1) - 1
        texts.append(
            f"[..., {part.rows}, {part.columns}] of {_DTYPES[code] if code < len(_DTYPES) else 'another dtype'}"
        )
    return "; ".join([f"rank {rank}: {text}" for rank, text in enumerate(texts)])


def _are_of_keys(parts: Sequence[OwnPart], spec: AttentionSpec) -> bool:
    """Whether the mask of each rank is a key mask: equal rows for its queries, columns for its own keys, and some key
    hidden.

    A mask that hides nothing may instead be a block of a larger mask, cut along both dims.
    """
    held = zip(spec.query_layout.sizes(), spec.key_layout.sizes(), strict=True)
    reviews = [part.flags >> _REVIEW_SHIFT for part in parts]
    return all(
        part.rows in (-1, 1) or (part[:2] == sizes and bits & EQUAL != 0)
        for part, sizes, bits in zip(parts, held, reviews, strict=True)
    ) and any(part.rows > 1 and bits & HIDES for part, bits in zip(parts, reviews, strict=True))


def _sizes_with_absent(sizes: Sequence[tuple[int, int]], spec: AttentionSpec) -> list[tuple[int, int]]:
    """Return the mask sizes of all ranks. A rank without a mask gets one row for its own keys, if the masks of the
    others are like this.

    Raises:
        ValueError: The masks of the other ranks have another form, so a mask for this rank is unknown.
    """
    held = spec.key_layout.sizes()
    fits = all(rows in (-1, 0, 1) and columns in (-1, held[rank]) for rank, (rows, columns) in enumerate(sizes))
    if not fits or max(held) < 2 or spec.key_layout.sharded == () or spec.is_causal:
        raise ValueError(_masks_differ([None if rows < 0 else f"[..., {rows}, {columns}]" for rows, columns in sizes]))
    return [(1, held[rank]) if rows < 0 else (rows, columns) for rank, (rows, columns) in enumerate(sizes)]


def _nothing_hidden(code: int, query: Tensor, last: tuple[int, int]) -> Tensor:
    """Return a mask that hides nothing, with the dtype and the leading dims that the other ranks state in ``code``."""
    dtype = _DTYPES[min(code & (1 << _DTYPE_BITS - 1) - 1, len(_DTYPES)) - 1]
    leading = [size if code >> _DTYPE_BITS + dim & 1 else 1 for dim, size in enumerate(query.shape[:-2])]
    shape = (*leading, *last)
    if dtype == torch.bool:
        return query.new_ones(shape, dtype=dtype)
    return query.new_zeros(shape, dtype=dtype).requires_grad_(bool(code >> _DTYPE_BITS - 1 & 1))


def _with_broadcast_rows(
    mask: Tensor | None, sizes: list[tuple[int, int]], layout: SequenceLayout, rank: int
) -> tuple[Tensor | None, list[tuple[int, int]]]:
    """Give a rank without queries a mask of one row, if the mask of every other rank has one row for all queries."""
    held = layout.sizes()
    without = [own for own, (rows, _) in enumerate(sizes) if rows == 0 and held[own] == 0]
    if not without or any(rows != 1 for own, (rows, _) in enumerate(sizes) if own not in without):
        return mask, sizes
    if all(held[own] <= 1 for own in range(len(held))):
        return mask, sizes  # One row may then be the row of a rank's only query.
    if rank in without and mask is not None:
        mask = mask.new_zeros((*mask.shape[:-2], 1, mask.shape[-1]))
    return mask, [(1, columns) for _, columns in sizes]


# -- a rank with a single token


def _read_single_tokens(
    mask: Tensor | None, extents: MaskExtents, parts: Sequence[OwnPart], spec: AttentionSpec, rank: int
) -> tuple[Tensor | None, MaskExtents]:
    """Take a mask dim of size 1 to be of this rank's token if no rank holds more than one; if it is of all tokens, that
    is the same.

    Raises:
        ValueError: both dims have size 1, and masks differ.
    """
    queries, keys = _holds_single_tokens(spec.query_layout), _holds_single_tokens(spec.key_layout)
    if mask is None:
        return mask, extents
    if queries and extents == MaskExtents("broadcast", "global"):
        return mask[..., : spec.query_layout.size(rank), :], MaskExtents("local", "global")
    if keys and extents == MaskExtents("global", "broadcast"):
        return mask[..., : spec.key_layout.size(rank)], MaskExtents("global", "local")
    digests = {part.mask_digest for part in parts if part.rows > 0}
    if queries and keys and extents == MaskExtents("broadcast", "broadcast") and (len(digests) > 1 or 0 in digests):
        raise ValueError(
            f"attn_mask is [..., 1, 1] on each of the ranks, which hold at most one of {spec.key_layout.total} tokens, "
            "and it differs: that may be a rank's query or its key. Pass the mask for all tokens: cp.local_mask(mask) "
            "gathers it along the keys, cp.gather(mask, dim=-2) along the queries."
        )
    return mask, extents


def _holds_single_tokens(layout: SequenceLayout) -> bool:
    """Whether several tokens are spread over the ranks, at most one on each."""
    return layout.total > 1 and max(layout.sizes()) == 1


def has_single_tokens(layout: SequenceLayout) -> bool:
    """Whether a rank holds exactly one token of a longer sequence."""
    return 1 in layout.sizes() and layout.total > 1


# Number of frames in which to look for the module that calls attention.
_FRAMES = 24


def _is_causal_caller() -> bool:
    """Whether the module that calls attention is causal: by its attribute ``is_causal``, or because it was called with
    ``is_causal=True``.

    This matters only if a rank holds one token: Hugging Face transformers then passes ``is_causal=False`` even in a
    causal model, because on one device a single token has nothing to hide.
    """
    frame, of_module = sys._getframe(1), None
    for _ in range(_FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        # Text encoders with a causal mask (CLIP) share a module that is not causal with image encoders.
        keywords = frame.f_locals.get("kwargs")
        if isinstance(keywords, dict) and keywords.get("is_causal") is True:
            return True
        for name in ("module", "self"):
            caller = frame.f_locals.get(name)
            if of_module is None and isinstance(caller, nn.Module):
                value = getattr(caller, "is_causal", None)
                of_module = value if isinstance(value, bool) else None
    return bool(of_module)


def _require_causal_known(parts: Sequence[OwnPart], layout: SequenceLayout) -> None:
    # A mask with a row for this token and a column per key of the sequence states what is hidden.
    if max(layout.sizes()) == 1 and any(part.flags & _CAUSAL_CALLER and part.columns <= 1 for part in parts):
        raise ValueError(
            f"each rank holds at most one of {layout.total} tokens, and a module that is causal calls attention with "
            "is_causal=False: models of Hugging Face transformers do so for a single token, which on one device has "
            "no later key. Here it has. Use fewer ranks or longer inputs, pass the model a 4-D mask over all tokens "
            "(cp.shard(mask, dim=-2)), or use propose_plan."
        )


# -- inputs that were never sharded


# Number of tokens that a digest reads.
_READ = 16


def _digest(query: Tensor, key: Tensor) -> int:
    """Return a digest of some tokens of this rank; 0 if it would prove nothing, because there is one token or all
    tokens are equal.
    """
    if min(query.shape[-2], key.shape[-2]) < 2 or 0 in query.shape or query.is_meta:
        return 0
    if innermost_transform() is not None:
        return 0
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return 0
    with torch.no_grad():
        parts = []
        for x in (query.detach(), key.detach()):
            count = min(x.shape[-2], _READ)
            index = torch.linspace(0, x.shape[-2] - 1, count, device=x.device).long()
            wide = torch.promote_types(x.dtype, torch.float32)
            sums = x.sum(dtype=wide), torch.linalg.vector_norm(x, dtype=wide)
            parts += [x.index_select(-2, index).to(wide).flatten(), *[number.view(1) for number in sums]]
        parts.append((query != query[..., :1, :]).any().view(1).to(wide))
        read = torch.cat(parts).cpu()
    if read[-1] == 0:
        return 0
    number = int.from_bytes(blake2b(read.numpy().tobytes(), digest_size=8).digest(), "little", signed=True)
    return number | 1


def _require_no_copies(parts: Sequence[OwnPart], spec: AttentionSpec) -> None:
    """Raise ``ValueError`` if every rank holds the same tokens in a causal call. Log a warning in another call, which
    is correct but wasteful.
    """
    if len(parts) == 1 or parts[0].digest == 0 or any(part.digest != parts[0].digest for part in parts):
        return
    if spec.is_causal:
        raise ValueError(
            f"every rank holds the same {spec.query_layout.sizes()[0]} tokens, and nothing was sharded: causal "
            f"attention would take them for {spec.query_layout.total} tokens, one rank's after the other's. Shard the "
            "inputs (x = cp.shard(x, dim=1), and position_ids with them) and gather the output; run what is not to be "
            "parallel under UnifiedAttnMode.disable(). generate() does not shard: use propose_plan, or decode with "
            "cp.using(...)."
        )
    # The result is correct, because attention to n copies of all keys equals attention to one.
    logger.warning(
        "every rank holds the same %d tokens, and nothing was sharded: each of %d ranks computes all of them. Shard "
        "the inputs (x = cp.shard(x, dim=1)) and gather the output (cp.gather).",
        spec.query_layout.sizes()[0],
        len(parts),
    )
