"""Handle ``attn_mask`` over a mesh: infer which tokens its dims cover, and return the part that a rank needs.

The *extent* of a dim tells whether it covers this rank's tokens (local), all tokens of the sequence (global),
or has size 1 (broadcast). A dim of size 1 stays 1 on every rank, so a key-padding mask stays ``[B, 1, 1,
S_k]``. If the key dim is local, the mask is gathered along it with all its rows; a mask with a row per query
then temporarily needs as much memory as on one device. If the query dim is local, rows are sent together with
the queries: to the Ulysses group, and to other ring ranks if these compute the queries, too.

:mod:`.mesh_attention` and, in eager code with an exchange, :mod:`.call_agreement` call these functions.
Whether the rows of a local mask are really those of its rank is decided in :mod:`.mask_rows`. Tests:
tests/attention/test_exactness.py and tests/attention/test_inputs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan
from para_core.layout.sequence import Run, SequenceLayout
from para_core.layout.tokens import gather_tokens

# A mask dim is "broadcast" if its size is 1, "global" if it has one entry per token of the whole sequence,
# and "local" if it has one entry per token of this rank.
Extent = Literal["broadcast", "global", "local"]


@dataclass(frozen=True)
class MaskExtents:
    """The extents of the last two dims of a mask: whether they cover this rank's tokens, all tokens, or have size 1."""

    queries: Extent
    keys: Extent


def infer_mask_extents(
    sizes: Sequence[tuple[int, int]],
    query_layout: SequenceLayout,
    key_layout: SequenceLayout,
    ranks: Sequence[int],
) -> MaskExtents:
    """Infer the extents of a mask (whether its dims are local, global or broadcast) from its last two sizes.

    ``sizes`` are those on each of ``ranks``: all ranks if they exchanged them (in eager code), otherwise this
    rank alone.

    >>> from para_core.layout.sequence import even_layout
    >>> layout = even_layout(8, ranks=2)
    >>> infer_mask_extents([(4, 8), (4, 8)], layout, layout, [0, 1])
    MaskExtents(queries='local', keys='global')
    >>> one_each = even_layout(2, ranks=2)
    >>> infer_mask_extents([(1, 2)], one_each, one_each, [0])
    MaskExtents(queries='local', keys='global')

    Raises:
        ValueError: The sizes fit no extent, or both dims are local.
    """
    queries = _infer_extent("query", [size for size, _ in sizes], query_layout, ranks)
    keys = _infer_extent("key", [size for _, size in sizes], key_layout, ranks)
    if queries == keys == "local":
        raise ValueError(
            f"attn_mask is [..., {sizes[0][0]}, {sizes[0][1]}]: a rank's queries by the same rank's keys. That is a "
            "block of the diagonal, and says nothing about other ranks' keys. Pass all columns (key dim "
            f"{key_layout.total}), or all rows (query dim {query_layout.total}). A model that builds its own mask from "
            "this rank's tokens (Hugging Face transformers: for padding, for position_ids that are not consecutive, "
            "and always while it is compiled) takes a 4-D mask over all tokens, sharded by rows: "
            "cp.shard(mask, dim=-2). propose_plan needs none."
        )
    if len(ranks) < query_layout.ranks:
        # If each rank holds one token, a size of 1 may be broadcast or local, and no rank knows. Next to a global
        # dim local is right for both: all ranks then have the same row or column, and exchange it for nothing.
        # Ranks that know all masks decide this with the marks of cp.shard (call_agreement._with_single_tokens).
        if queries == "broadcast" and keys == "global" and _holds_one_each(query_layout):
            queries = "local"
        elif keys == "broadcast" and queries == "global" and _holds_one_each(key_layout):
            keys = "local"
    return MaskExtents(queries, keys)


def _holds_one_each(layout: SequenceLayout) -> bool:
    """Whether each of several ranks holds one token. While tracing, other lengths cost one guard."""
    return layout.total == layout.ranks and all(size == 1 for size in layout.sizes())


def _infer_extent(kind: str, sizes: Sequence[int], layout: SequenceLayout, ranks: Sequence[int]) -> Extent:
    """Infer the extent of one dim. If ranks exchanged their sizes, the result, or the error, is equal on all
    of them.

    Otherwise a rank decides by its own size, so a size that could mean two things must raise on at least one
    rank. A rank whose part is 1 then takes its mask for a broadcast one and goes on. The ranks with other
    parts raise, so that it waits for them in vain, instead of computing something else than they do. If all
    parts are 1, :func:`infer_mask_extents` decides.

    >>> from para_core.layout.sequence import even_layout
    >>> _infer_extent("key", [2, 1], even_layout(3, ranks=2), [0, 1])
    'local'
    >>> _infer_extent("key", [2], even_layout(3, ranks=2), [0])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: attn_mask has key dim 2, this rank's part of 3. Another rank's part is 1, ...
    >>> _infer_extent("key", [0], even_layout(1, ranks=2), [1])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: attn_mask has key dim 0, and of 1 tokens one rank holds all: ...
    """
    if all(size == 1 for size in sizes):
        return "broadcast"
    # Ranks exchange the sizes of their masks in eager code only.
    knows_own_size_only = len(ranks) < layout.ranks
    holds_all = [size == layout.total for size in layout.sizes()]
    if knows_own_size_only and True in holds_all and False in holds_all:
        raise ValueError(
            f"attn_mask has {kind} dim {sizes[0]}, and of {layout.total} tokens one rank holds all: there a mask of a "
            "rank's part cannot be told from one for all tokens. Call this attention outside of the compiled function."
        )
    if all(size == layout.total for size in sizes):
        return "global"
    if all(size == layout.size(rank) for size, rank in zip(sizes, ranks, strict=True)):
        if knows_own_size_only and 1 in layout.sizes():
            raise ValueError(
                f"attn_mask has {kind} dim {sizes[0]}, this rank's part of {layout.total}. Another rank's part is 1, "
                "which there means broadcast, and without an exchange no rank knows what the others have. Pass the "
                "mask for all tokens: cp.local_mask(mask, sequence=...) gathers it along the keys, cp.gather(mask, "
                "dim=-2, sequence=...) along the queries."
            )
        return "local"
    parts = ", ".join([str(layout.size(rank)) for rank in ranks])
    sizes_text = ", ".join([str(size) for size in sizes])
    raise ValueError(
        f"attn_mask has {kind} dim {sizes_text}; expected 1, or {layout.total} (the whole sequence), or {parts} (a "
        "rank's part)."
    )


def mask_of_block(mask: Tensor, extents: MaskExtents, plan: AttentionPlan) -> Tensor:
    """Return the part of ``mask`` for the queries and heads that this rank computes after the Ulysses
    exchange.

    The function is differentiable. It is a collective call if a dim of ``mask``, ``[B or 1, H or 1, S_q,
    S_k]``, is local, so ``extents`` must be equal on all ranks. The result is ``[B or 1, H_local or 1,
    S_block or 1, total or 1]``. Rows are in the order of this rank's queries, followed by those of the other
    queries that this rank computes (:attr:`RingStyle.other_queries`). Columns are positions in the whole
    sequence.
    """
    if mask.dtype == torch.bool:  # Send bytes instead, because gloo cannot send bool tensors.
        return mask_of_block(mask.view(torch.uint8), extents, plan).view(torch.bool)
    mesh = plan.spec.mesh
    if extents.keys == "local":
        mask = gather_tokens(mask, 3, plan.spec.key_layout, mesh)
    heads: Sequence[Run]
    if mask.shape[1] > 1:
        heads = plan.heads.query_runs
    else:
        heads = [(0, 1)] * mesh.ulysses.size
    if extents.queries == "local" and plan.ulysses is not None:
        # Exchange this rank's rows for all heads for the rows of the Ulysses group for this rank's heads.
        mask = plan.ulysses.enter_mask(mask, heads)
    elif mask.shape[1] > 1:
        # Without a Ulysses step there is one Ulysses rank, which has all heads.
        mask = mask.narrow(1, *heads[mesh.ulysses.index])
    if extents.queries == "global":
        runs = [*plan.ring.query_runs, *plan.style.other_queries]
        parts = [mask.narrow(2, start, length) for start, length in runs]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=2)
    if extents.queries == "broadcast":
        return mask
    return plan.style.add_other_rows(mask)
