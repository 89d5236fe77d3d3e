"""Handle attention calls in which a rank holds a single token.

Such calls are ambiguous. A mask dim of size 1 may belong to this token or be broadcast to all tokens, and a causal
model may pass ``is_causal=False``.
"""

from __future__ import annotations

import sys
from collections.abc import Set

from torch import Tensor, nn

from para_core.attention.mask import MaskExtents
from para_core.attention.spec import AttentionSpec
from para_core.distributed.layout import SequenceLayout

# At most this number of stack frames is searched for the module that calls attention.
_FRAMES = 24


def has_single_tokens(layout: SequenceLayout) -> bool:
    """Whether any rank holds exactly one token of a longer sequence."""
    return 1 in layout.sizes() and layout.total > 1


def _holds_single_tokens(layout: SequenceLayout) -> bool:
    """Whether the sequence has several tokens, of which no rank holds more than one."""
    return layout.total > 1 and max(layout.sizes()) == 1


def read_single_tokens(
    mask: Tensor | None, extents: MaskExtents, digests: Set[int], spec: AttentionSpec, rank: int
) -> tuple[Tensor | None, MaskExtents]:
    """Return ``mask`` and its extents. If no rank holds more than one token, a dim of size 1 becomes ``"local"``.

    Such a dim may also be broadcast to all tokens. The result is then still correct, because all ranks have the same
    row or column.

    Args:
        mask: The mask of this rank, or None.
        extents: The extents of its last two dims. Dims of size 1 are ``"broadcast"``.
        digests: The digests of the masks of those ranks whose mask has rows.
        spec: The specification of the call.
        rank: The index of this rank.

    Raises:
        ValueError: Both dims have size 1, and the masks of the ranks differ.
    """
    queries, keys = _holds_single_tokens(spec.query_layout), _holds_single_tokens(spec.key_layout)
    if mask is None:
        return mask, extents
    if queries and extents == MaskExtents("broadcast", "global"):
        return mask[..., : spec.query_layout.size(rank), :], MaskExtents("local", "global")
    if keys and extents == MaskExtents("global", "broadcast"):
        return mask[..., : spec.key_layout.size(rank)], MaskExtents("global", "local")
    if queries and keys and extents == MaskExtents("broadcast", "broadcast") and (len(digests) > 1 or 0 in digests):
        raise ValueError(
            f"attn_mask is [..., 1, 1] on each of the ranks, which hold at most one of {spec.key_layout.total} tokens, "
            "and it differs: that may be a rank's query or its key. Pass the mask for all tokens: cp.local_mask(mask) "
            "gathers it along the keys, cp.gather(mask, dim=-2) along the queries."
        )
    return mask, extents


def is_causal_caller() -> bool:
    """Whether the module that calls attention is causal, found by searching the stack.

    A module is causal if its attribute ``is_causal`` is True or if it was called with ``is_causal=True``. The question
    matters only if a rank holds one token: Hugging Face transformers then passes ``is_causal=False`` to SDPA even in a
    causal model, because on one device a single token has no later key to hide.
    """
    frame, of_module = sys._getframe(1), None
    for _ in range(_FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        # Look at keyword arguments too: causal text encoders (CLIP) share a module class with image encoders, so the
        # attribute of the module is False.
        keywords = frame.f_locals.get("kwargs")
        if isinstance(keywords, dict) and keywords.get("is_causal") is True:
            return True
        for name in ("module", "self"):
            caller = frame.f_locals.get(name)
            if of_module is None and isinstance(caller, nn.Module):
                value = getattr(caller, "is_causal", None)
                of_module = value if isinstance(value, bool) else None
    return bool(of_module)


def require_causal_known(layout: SequenceLayout) -> None:
    """Raise ``ValueError`` if no rank holds more than one token.

    Call this for a causal module that passes ``is_causal=False``. Some models do so for a single token, and the call
    then does not tell that later keys are to be hidden.
    """
    if max(layout.sizes()) == 1:
        raise ValueError(
            f"each rank holds at most one of {layout.total} tokens, and a module that is causal calls attention with "
            "is_causal=False: models of Hugging Face transformers do so for a single token, which on one device has "
            "no later key. Here it has. Use fewer ranks or longer inputs, pass the model a 4-D mask over all tokens "
            "(cp.shard(mask, dim=-2)), or use propose_plan."
        )
