"""Attention of a patch to all tokens: its own keys are of now, those behind it of the step before. Approximate."""

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
    """Keys and values ``[B, H, S, D]`` of all tokens, of one attention call, and the mask of these keys, if it has one."""

    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def update(self, rows: Sequence[Rows], key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """A patch has these rows; ``mask`` is of its keys."""
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
    """Keys and values of all tokens, of each attention call of this rank's blocks, in one branch of guidance.

    :meth:`attend` stands in for ``scaled_dot_product_attention``, in compiled blocks :meth:`attend_in_graph`. Where all tokens are
    computed it holds their keys. A patch writes its rows, and attends to all: what stands before them is of now, what behind of the step
    before. Attention to what is not split into patches (Wan's text) is left as it is. Ranks that share a sequence exchange the keys of each patch, once, and hold those of all tokens.

    Args:
        places: what the call under way is of.
    """

    places: PatchPlaces
    held: list[Held] = field(default_factory=list)
    _calls: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.held)

    def begin(self, *, whole: bool) -> None:
        """A call of the model; with all tokens, their keys are held from then on."""
        self._calls = 0
        if whole:
            self.held.clear()

    def attend(self, call: SdpaCall) -> Tensor:
        """Compute an intercepted call in eager code."""
        return self._attend(self.places.next_attention(), outer_attention, call)

    def attend_in_graph(self, kind: int, call: SdpaCall) -> Tensor:
        """What an operator computes that stands in a graph for attention of the number ``kind``."""
        attention = self.places.kinds[kind]
        attention_is_skipped(self.places.module)
        return self._attend(attention, planned_attention(self.places.module, attention), call)

    def _attend(self, attention: Attention, outer: SdpaHandler, call: SdpaCall) -> Tensor:
        """
        Args:
            outer: computes the call if all tokens are computed.
            call: its query is ``[B, H, S_own, D]``, of the tokens of this patch.

        Raises:
            RuntimeError: it is attention to something else than the plan says, or has a mask that cannot be read.
        """
        cutting = self.places.cutting
        names = attention.keys or attention.queries
        if cutting is None or not cutting.cuts(names):
            return outer(call)
        whole = cutting.mesh.ranks == 1
        query_length, key, value, attn_mask = self._of_all_ranks(attention, *call[:4])
        found, queries = cutting.rows(names, key.shape[-2]), cutting.rows(attention.queries, query_length)
        causal = call.is_causal
        if found is None or queries is None or causal:
            raise RuntimeError(
                f"an attention call has {query_length} queries and {key.shape[-2]} keys{', and is causal' if causal else ''}; of a patch, "
                f"{' + '.join(attention.queries)} attend to {' + '.join(names)}, as the model's plan says. Leave pipefusion= out: stages "
                "are exact then."
            )
        if whole:
            held = [x.detach().clone(memory_format=torch.contiguous_format) for x in (key, value)]
            self.held.append(Held(held[0], held[1], None if attn_mask is None else attn_mask.detach().clone()))
            return outer(call)
        rows, total = found
        one, self._calls = self.held[self._calls], self._calls + 1
        mask = _mask_of_patch(attn_mask, queries[0], one.mask, key.shape[-2], total)
        of_patch = mask is not None and mask.shape[-1] != total
        one.update(rows, key, value, mask if of_patch else None)
        attention_is_skipped(self.places.module)
        return call.with_tensors(call.query, one.key, one.value, one.mask if of_patch else mask).on_one_device()

    def _of_all_ranks(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """Where ranks share a patch: how many queries all of them have, and the keys, values and mask of all. One exchange."""
        over = segments_under_way(self.places.module)
        if over is None:
            return query.shape[-2], key, value, mask
        mesh, segments = over
        of_queries, of_keys = planned_layouts(attention, segments, mesh, query.shape[-2], key.shape[-2])
        if mask is not None and mask.shape[-2] != 1:
            raise RuntimeError(
                f"an attention call on {mesh.ranks} sequence ranks has a mask {list(mask.shape)}; PipeFusion knows masks of keys there. Leave "
                "pipefusion= out: stages are exact then."
            )
        if mask is not None and mask.shape[-1] == key.shape[-2] != of_keys.total:
            mask = gather_tokens(mask, -1, of_keys, mesh)
        both = gather_tokens(torch.cat([key, value], dim=1), -2, of_keys, mesh)
        key, value = both.split([key.shape[1], value.shape[1]], dim=1)
        return of_queries.total, key, value, mask


def _mask_of_patch(
    mask: Tensor | None, queries: Sequence[Rows], whole: Tensor | None, num_keys: int, total: int
) -> Tensor | None:
    """A mask of the queries of a patch: its columns are of all keys, or of the patch's."""
    if mask is None and whole is None:
        return None
    own = sum(length for _, length in queries)
    if mask is not None and whole is not None and mask.shape[-1] in (total, num_keys):
        if mask.shape[-2] == 1 or (mask.shape[-1] == total and mask.shape[-2] == own):
            return mask
        if mask.shape[-1] == total and mask.shape[-2] == whole.shape[-2]:
            return torch.cat([mask.narrow(-2, *rows) for rows in queries], dim=-2)
    given, held = ["no mask" if x is None else f"a mask {list(x.shape)}" for x in (mask, whole)]
    raise RuntimeError(
        f"an attention call of a patch of {own} queries and {num_keys} of {total} keys has {given}; the whole one had {held}. PipeFusion knows "
        "masks of keys. Leave pipefusion= out: stages are exact then."
    )
