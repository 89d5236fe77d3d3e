"""Attention of a patch to all tokens, with the keys that other patches had at the previous step. Not exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.distributed.sharding import gather_tokens
from para_core.modes.interceptor import outer_attention
from para_core.plans.attention import planned_layouts
from para_core.plans.plan import Attention
from para_core.plans.region import attention_is_skipped, planned_attention, segments_under_way
from para_core.weights.patch_plan import PatchPlaces, Rows


@dataclass
class Held:
    """The stored keys and values ``[B, H, S, D]`` of all tokens in one attention call, and the mask of these keys, if
    any.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def update(self, rows: Sequence[Rows], key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Replace the keys, values and mask columns at ``rows``, those of one patch."""
        pairs = [(self.key, key, -2), (self.value, value, -2)]
        if mask is not None and self.mask is not None:
            pairs.append((self.mask, mask, -1))
        for whole, part, dim in pairs:
            start = 0
            for begin, length in rows:
                whole.narrow(dim, begin, length).copy_(part.narrow(dim, start, length))
                start += length


@dataclass
class StaleKeys:
    """The stored keys and values of all tokens, for each attention call of this rank's blocks in one CFG branch.

    :meth:`attend` computes ``scaled_dot_product_attention`` in eager code, :meth:`attend_in_graph` in compiled blocks.
    A call with all tokens stores their keys. A call of a patch replaces the rows of the patch and attends to all keys:
    those before its rows are of this step, those after them of the previous step. Attention to segments without
    patches, such as Wan's text, is not changed. Ranks that share a sequence exchange the keys of each patch once, and
    store those of all tokens.

    Args:
        places: Identifies the attention calls of the current model call.
    """

    places: PatchPlaces
    held: list[Held] = field(default_factory=list)
    _calls: int = 0

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held)

    def begin(self, *, whole: bool) -> None:
        """Begin a call of the model. With ``whole``, all tokens are computed, and their keys replace the stored
        ones.
        """
        self._calls = 0
        if whole:
            self.held.clear()

    def attend(self, call: SdpaCall) -> Tensor:
        """Compute an intercepted call in eager code."""
        return self._attend(self.places.next_attention(), outer_attention, call)

    def attend_in_graph(self, kind: int, call: SdpaCall) -> Tensor:
        """Compute an attention call of index ``kind`` for the operator that represents it in a graph."""
        attention = self.places.kinds[kind]
        attention_is_skipped(self.places.module)
        return self._attend(attention, planned_attention(self.places.module, attention), call)

    def _attend(self, attention: Attention, outer: SdpaHandler, call: SdpaCall) -> Tensor:
        """Compute ``call``, whose query ``[B, H, S_own, D]`` has the tokens of this patch.

        Args:
            outer: Computes the call if all tokens are computed.

        Raises:
            RuntimeError: The lengths do not fit the plan, or the mask has an unknown form.
        """
        cutting = self.places.cutting
        names = attention.keys or attention.queries
        if cutting is None or not cutting.cuts(names):
            return outer(call)
        whole = cutting.mesh.ranks == 1
        query_length, key, value, attn_mask = self._of_all_ranks(attention, *call[:4])
        keys, queries = cutting.rows(names, key.shape[-2]), cutting.rows(attention.queries, query_length)
        causal = call.is_causal
        if keys is None or queries is None or causal:
            raise RuntimeError(
                f"an attention call of a patch has {query_length} queries and {key.shape[-2]} "
                f"keys{', and is causal' if causal else ''}; by the model's plan {' + '.join(attention.queries)} "
                f"attend to {' + '.join(names)}. Leave pipefusion= out: stages are exact then."
            )
        if whole:
            held = [x.detach().clone(memory_format=torch.contiguous_format) for x in (key, value)]
            self.held.append(Held(held[0], held[1], None if attn_mask is None else attn_mask.detach().clone()))
            return outer(call)
        rows, total = keys
        stored, self._calls = self.held[self._calls], self._calls + 1
        mask = _mask_of_patch(attn_mask, queries[0], stored.mask, key.shape[-2], total)
        of_patch = mask is not None and mask.shape[-1] != total
        stored.update(rows, key, value, mask if of_patch else None)
        attention_is_skipped(self.places.module)
        return call.with_tensors(
            call.query, stored.key, stored.value, stored.mask if of_patch else mask
        ).on_one_device()

    def _of_all_ranks(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """Return the number of queries, and the keys, values and mask, of all ranks that share the patch. One
        exchange.
        """
        over = segments_under_way(self.places.module)
        if over is None:
            return query.shape[-2], key, value, mask
        mesh, segments = over
        of_queries, of_keys = planned_layouts(attention, segments, mesh, query.shape[-2], key.shape[-2])
        if mask is not None and mask.shape[-2] != 1:
            raise RuntimeError(
                f"an attention call on {mesh.ranks} sequence ranks has a mask {list(mask.shape)}; PipeFusion supports "
                "only masks of keys there. "
                "Leave pipefusion= out: stages are exact then."
            )
        if mask is not None and mask.shape[-1] == key.shape[-2] != of_keys.total:
            mask = gather_tokens(mask, -1, of_keys, mesh)
        both = gather_tokens(torch.cat([key, value], dim=1), -2, of_keys, mesh)
        key, value = both.split([key.shape[1], value.shape[1]], dim=1)
        return of_queries.total, key, value, mask


def _mask_of_patch(
    mask: Tensor | None, queries: Sequence[Rows], whole: Tensor | None, num_keys: int, total: int
) -> Tensor | None:
    """Return the mask for the queries of a patch. Its columns are all keys, or those of the patch.

    Args:
        mask: The mask of the patch's call.
        queries: The rows of the patch's queries.
        whole: The stored mask of the call with all tokens.
        num_keys, total: Numbers of keys of the patch, and of all patches.

    Raises:
        RuntimeError: The masks have an unknown form.
    """
    if mask is None and whole is None:
        return None
    own = sum(length for _, length in queries)
    if mask is not None and whole is not None and mask.shape[-1] in (total, num_keys):
        if mask.shape[-2] == 1 or (mask.shape[-1] == total and mask.shape[-2] == own):
            return mask
        if mask.shape[-1] == total and mask.shape[-2] == whole.shape[-2]:
            return torch.cat([mask.narrow(-2, *rows) for rows in queries], dim=-2)
    of_patch, of_all = ["no mask" if x is None else f"a mask {list(x.shape)}" for x in (mask, whole)]
    raise RuntimeError(
        f"an attention call of a patch with {own} queries and {num_keys} of {total} keys has {of_patch}; with all "
        f"tokens it had {of_all}. "
        "PipeFusion supports masks of keys. Leave pipefusion= out: stages are exact then."
    )
