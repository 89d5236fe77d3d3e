"""Detect calls that a model makes as if it had the whole sequence: with masks counted from this rank's first
token.

A model that builds its causal mask from the length of its input gives every rank rows 0, 1, … of the mask,
which are wrong on all ranks but the first. Such a mask has the shape of a correctly sharded one, ``[...,
S_local, S]``, so only its values can tell. In a correct causal mask each query sees its own key. In a causal
mask whose rows were counted from 0, row i shows no key after key i, on any rank. A mask that is not causal
(such as a window to both sides) and was counted from 0 is the same on every rank, while a correct mask is the
same on every rank only if all its rows are equal.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor, nn

from para_core.attention.masks import MaskExtents
from para_core.attention.spec import AttentionSpec
from para_core.layout.sequence import SequenceLayout
from para_core.torch_internals import innermost_transform, owner_of, version_of

# A rank describes its mask by these bits of one integer. A row of the mask belongs to a query.
LOWER = 1  # No row i of the mask shows a key after key i. Rows that show all keys are ignored.
DIFFER = 2  # At least two rows of the mask show different keys, and a row shows some keys but not all.
SHOWS = 4  # At least one row of the mask shows a key.
EQUAL = 8  # All rows of the mask are equal.
HIDES = 16  # At least one row of the mask hides a key.

# A number below this in a float mask counts as hiding a key. Models hide keys with -inf, finfo(dtype).min or
# about -10000, which bfloat16 rounds to -9984.
_HIDDEN = -9900.0
_MOST_REVIEWS = 16
# Ranks compare at most this number of rows of their masks.
_MOST_COMPARED = 16
# At most this number of stack frames is searched for the module that calls attention.
_MOST_FRAMES = 24


class Review(NamedTuple):
    """The findings of a rank about the values of its mask, from which :func:`check_own_rows` decides.

    ``bits`` is the sum of the flags above that are true, ``LOWER`` to ``HIDES``. ``digest`` is a digest of
    some rows, with the same indices on all ranks. It is 0 if comparing it would prove nothing: if there are
    no such rows, or if all rows or all columns are equal. Both fields are 0 for a mask that was not read: one
    that :meth:`MaskReviews.trust` marked as correct, and any mask while a CUDA graph is captured.
    """

    bits: int = 0
    digest: int = 0


class MaskReviews:
    """A cache of :class:`Review` values: layers that share a mask read it once, until it is changed in place."""

    def __init__(self) -> None:
        self._reviews: deque[tuple[weakref.ref[Tensor], tuple[object, ...], Review]] = deque(
            maxlen=_MOST_REVIEWS
        )

    def trust(self, mask: Tensor) -> None:
        """Record that the rows of ``mask`` belong to this rank's tokens, without reading the mask."""
        self._reviews.append((*_identity(mask), Review()))

    def of(self, mask: Tensor, num_common: int) -> Review:
        """Return the review of ``mask``. If none is cached, the mask is read, and the host waits for the
        device.

        A tensor of inference mode is read at each call, because it does not count how often it is written.
        ``num_common``, the number of rows that every rank's mask has at least, must not change for the same
        mask.
        """
        owner, version = _identity(mask)
        for known_owner, known_version, review in self._reviews:
            if known_owner() is owner() and known_version == version:
                return review
        review = _review(mask, num_common)
        if not mask.is_inference():
            self._reviews.append((owner, version, review))
        return review


def _identity(mask: Tensor) -> tuple[weakref.ref[Tensor], tuple[object, ...]]:
    """Return a weak reference to the tensor that owns the memory of ``mask``, and a tuple that identifies the
    view.

    A model may pass a new view of one mask to each layer. These share one entry until the memory is changed
    in place.
    """
    owner = owner_of(mask)
    written = None
    if not owner.is_inference():
        written = version_of(owner)
    return weakref.ref(owner), (mask.shape, mask.stride(), mask.storage_offset(), written)


def _review(mask: Tensor, num_common: int) -> Review:
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return Review()
    with torch.no_grad():
        mask = mask.detach()
        shown = mask
        if mask.dtype != torch.bool:
            shown = mask > _HIDDEN
        # Ignore rows that see all keys: some models fill a row without keys like this, to avoid NaN.
        telling = shown & ~shown.all(dim=-1, keepdim=True)
        behind = telling.triu(1).any()
        # Rows that see all keys or none, such as padded queries, do not tell from which token rows were
        # counted.
        differ = telling.any() & (shown.any(dim=-2) & ~shown.all(dim=-2)).any()
        equal = (mask == mask[..., :1, :]).all()
        # Combine the findings on the device, so that the host waits for it only once.
        code = LOWER * ~behind + DIFFER * differ + SHOWS * shown.any() + EQUAL * equal + HIDES * ~shown.all()
        bits = int(code.item())
        rows = mask[..., :num_common, :]
        if 0 in rows.shape or (bits & EQUAL and mask.shape[-2] > 1):
            return Review(bits)
        read = evenly_spaced_rows(rows, _MOST_COMPARED).cpu()
        all_equal = read.shape[-2] > 1 and torch.equal(read, read[..., :1, :].expand_as(read))
        # Rows of a single value, such as those of padded queries, do not tell either which tokens they belong
        # to.
        of_one_value = read.shape[-1] > 1 and torch.equal(read, read[..., :1].expand_as(read))
        if all_equal or of_one_value:
            return Review(bits, 0)
        return Review(bits, digest_of(read))


def evenly_spaced_rows(x: Tensor, most: int) -> Tensor:
    """Return at most ``most`` evenly spaced rows of ``x`` along dim -2, including the first and the last one."""
    count = min(x.shape[-2], most)
    return x.index_select(-2, torch.linspace(0, x.shape[-2] - 1, count, device=x.device).long())


def digest_of(x: Tensor) -> int:
    """Return a digest of a CPU tensor as a signed 64-bit integer. It is never 0."""
    values = x.contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(blake2b(values, digest_size=8).digest(), "little", signed=True) | 1


def needs_review(mask: Tensor, query_layout: SequenceLayout, key_layout: SequenceLayout, rank: int) -> bool:
    """Whether only the values of ``mask`` can tell if its rows belong to this rank's tokens.

    This is the case for ``[..., S_local, S]`` in self-attention, and for ``[..., S_q_local, S_k_local]``.
    """
    if mask.is_meta or innermost_transform() is not None:
        return False
    rows, columns = mask.shape[-2:]
    total, held = key_layout.total, key_layout.size(rank)
    if rows != query_layout.size(rank):
        return False
    if columns == held and key_layout.sharded:
        return True
    itself = query_layout.total == total and query_layout.sizes() == key_layout.sizes()
    return itself and 1 < columns == total and rows < total


def num_common_rows(layout: SequenceLayout) -> int:
    """Return the number of rows that the masks of all ranks with tokens have at least: the fewest tokens of any."""
    return min([size for size in layout.sizes() if size > 0], default=0)


def check_own_rows(reviews: Sequence[Review], layout: SequenceLayout, *, is_causal: bool) -> None:
    """Raise ``ValueError`` if the masks look as if every rank had counted its rows from 0. All ranks decide
    the same.

    Each mask is ``[..., S_local, S]``. The masks look so in three cases: the rows of each mask differ, but on
    no rank does a row i show a key after key i; the model is causal (``is_causal``), but all masks hide every
    key; or all ranks have the same rows, which differ from each other, and the sequence has a single segment.
    """
    of_ranks = [(review, size) for review, size in zip(reviews, layout.sizes(), strict=True) if size > 0]
    if len(of_ranks) < 2:
        return
    finding, advice = None, "pass no mask if nothing is padded; "
    several = [review.bits for review, size in of_ranks if size > 1]
    if all(review.bits & LOWER for review, _ in of_ranks):
        if is_causal and not any(review.bits & SHOWS for review, _ in of_ranks):
            finding = "hides every key on all ranks"
        elif all(bits & DIFFER for bits in several) and (len(several) > 1 or is_causal):
            finding = "has no row i that shows a key after i, on any rank"
    digests = {review.digest for review, _ in of_ranks}
    # Compare ranks only if there is one segment. With several, equal rows on all ranks can be correct, such
    # as those of text that does not attend to the image.
    if finding is None and several and len(layout.segments) == 1 and len(digests) == 1 and 0 not in digests:
        finding, advice = "has the same rows on all ranks, which differ from each other", ""
    if finding is None:
        return
    sizes = ", ".join([str(size) for size in layout.sizes()])
    raise ValueError(
        f"attn_mask has a row for each of a rank's own tokens ({sizes} of {layout.total}) and {layout.total} columns, "
        f"and it {finding}. So its rows were counted from this rank's first token, as a model does that builds its "
        "mask from the length of its input (Hugging Face transformers, given a 2-D attention_mask). On all ranks but "
        "the first these are the wrong rows. Pass the model a 4-D mask over all tokens, sharded by "
        f"rows: cp.shard(mask, dim=-2); {advice}or use propose_plan, which runs the part that builds the mask on all "
        "tokens."
    )


# The following functions handle calls in which a rank holds a single token. Such calls are ambiguous: a mask
# dim of size 1 may belong to this token or be broadcast to all tokens, and a causal model may pass
# ``is_causal=False``.


def has_single_tokens(layout: SequenceLayout) -> bool:
    """Whether any rank holds exactly one token of a longer sequence."""
    return 1 in layout.sizes() and layout.total > 1


def _holds_single_tokens(layout: SequenceLayout) -> bool:
    """Whether the sequence has several tokens, and no rank holds more than one of them."""
    return layout.total > 1 and max(layout.sizes()) == 1


def read_single_tokens(
    mask: Tensor | None, extents: MaskExtents, digests: Set[int], spec: AttentionSpec, rank: int
) -> tuple[Tensor | None, MaskExtents]:
    """Return ``mask`` and its extents. If no rank holds more than one token, and the other dim of the mask is
    global, a broadcast dim becomes ``"local"``, with size 0 on ranks without a token. If it was meant as
    broadcast, the result is still correct, because all ranks have the same row or column. ``digests`` are
    those of all masks that have rows.

    Raises:
        ValueError: Both dims have size 1, and the masks of the ranks differ or may differ.
    """
    queries, keys = _holds_single_tokens(spec.query_layout), _holds_single_tokens(spec.key_layout)
    if mask is None:
        return mask, extents
    if queries and extents == MaskExtents("broadcast", "global"):
        return mask[..., : spec.query_layout.size(rank), :], MaskExtents("local", "global")
    if keys and extents == MaskExtents("global", "broadcast"):
        return mask[..., : spec.key_layout.size(rank)], MaskExtents("global", "local")
    if (
        queries
        and keys
        and extents == MaskExtents("broadcast", "broadcast")
        and (len(digests) > 1 or 0 in digests)
    ):
        raise ValueError(
            f"attn_mask is [..., 1, 1] on each of the ranks, which hold at most one of {spec.key_layout.total} tokens, "
            "and it differs: that may be a rank's query or its key. Pass the mask for all tokens: cp.local_mask(mask) "
            "gathers it along the keys, cp.gather(mask, dim=-2) along the queries."
        )
    return mask, extents


def is_causal_caller() -> bool:
    """Whether the module that calls attention is causal, found by searching the stack.

    A module is causal if its attribute ``is_causal`` is True or if it was called with ``is_causal=True``. The
    question matters only if a rank holds one token: Hugging Face transformers then passes ``is_causal=False``
    to SDPA even in a causal model, because on one device a single token has no later key to hide.
    """
    frame, of_module = sys._getframe(1), None
    for _ in range(_MOST_FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        # Look at keyword arguments too: causal text encoders (CLIP) share a module class with image encoders,
        # so the attribute of the module is False.
        keywords = frame.f_locals.get("kwargs")
        if isinstance(keywords, dict) and keywords.get("is_causal") is True:
            return True
        for name in ("module", "self"):
            caller = frame.f_locals.get(name)
            if of_module is None and isinstance(caller, nn.Module):
                value = getattr(caller, "is_causal", None)
                if isinstance(value, bool):
                    of_module = value
    return bool(of_module)


def check_causal_known(layout: SequenceLayout) -> None:
    """Raise ``ValueError`` if no rank holds more than one token, for a causal module that passes
    ``is_causal=False``.

    Some models do so for a single token, and the call then does not tell that later keys are to be hidden.
    """
    if max(layout.sizes()) == 1:
        raise ValueError(
            f"each rank holds at most one of {layout.total} tokens, and a module that is causal calls attention with "
            "is_causal=False: models of Hugging Face transformers do so for a single token, which on one device has "
            "no later key. Here it has. Use fewer ranks or longer inputs, pass the model a 4-D mask over all tokens "
            "(cp.shard(mask, dim=-2)), or use propose_plan."
        )
