"""Detect attention calls in which every rank holds the same tokens, because the user never sharded the inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.attention.local_rows import digest_of, evenly_spaced_rows
from para_core.attention.spec import AttentionSpec
from para_core.torch_internals import innermost_transform

logger = logging.getLogger(__name__)

# The largest number of tokens of query, and of key, whose values go into a digest one by one.
_READ = 16


def tokens_digest(query: Tensor, key: Tensor) -> int:
    """Return a digest of this rank's query and key, to compare with the digests of other ranks.

    Return 0 if equal digests would prove nothing (there are fewer than two tokens, or all queries are equal), or if the
    values cannot be read (meta tensors, ``torch.func`` transforms, CUDA graph capture).
    """
    if min(query.shape[-2], key.shape[-2]) < 2 or 0 in query.shape or query.is_meta:
        return 0
    if innermost_transform() is not None or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return 0
    with torch.no_grad():
        parts = []
        for x in (query.detach(), key.detach()):
            wide = torch.promote_types(x.dtype, torch.float32)
            sums = x.sum(dtype=wide), torch.linalg.vector_norm(x, dtype=wide)
            parts += [evenly_spaced_rows(x, _READ).to(wide).flatten(), *[number.view(1) for number in sums]]
        parts.append((query != query[..., :1, :]).any().view(1).to(wide))
        read = torch.cat(parts).cpu()
    return 0 if read[-1] == 0 else digest_of(read)


def require_no_copies(digests: Sequence[int], spec: AttentionSpec) -> None:
    """Raise ``ValueError`` or log a warning if equal digests show that all ranks hold the same tokens.

    A causal call raises, because its result would be wrong. Any other call is correct but wasteful, and only warns.
    """
    if len(digests) == 1 or digests[0] == 0 or any(digest != digests[0] for digest in digests):
        return
    if spec.is_causal:
        raise ValueError(
            f"every rank holds the same {spec.query_layout.sizes()[0]} tokens, and nothing was sharded: causal "
            f"attention would take them for {spec.query_layout.total} tokens, one rank's after the other's. Shard the "
            "inputs (x = cp.shard(x, dim=1), and position_ids with them) and gather the output; run what is not to be "
            "parallel under UnifiedAttnMode.disable(). generate() does not shard: use propose_plan, or decode with "
            "cp.using(...)."
        )
    # Only warn: the result is correct, because attention to n copies of all keys equals attention to one copy.
    logger.warning(
        "every rank holds the same %d tokens, and nothing was sharded: each of %d ranks computes all of them. Shard "
        "the inputs (x = cp.shard(x, dim=1)) and gather the output (cp.gather).",
        spec.query_layout.sizes()[0],
        len(digests),
    )
