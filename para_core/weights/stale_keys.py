"""Attention of one PipeFusion patch to all tokens.

Not exact: the keys of later patches are from the previous step.

:mod:`.pipefusion` keeps one :class:`StaleKeys` for each CFG branch, and replaces it before each call of all
tokens. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.layout.sequence import Run
from para_core.layout.tokens import gather_tokens
from para_core.modes.interceptor import outer_attention
from para_core.plans.current_call import allow_skipped_attention, interception_of, segments_under_way
from para_core.plans.plan import Attention
from para_core.plans.planned_attention import layout_of_segments, planned_layouts
from para_core.weights.patch_hooks import PatchHooks, write_runs

_WAY_OUT = "Leave pipefusion= out: stages are exact then."


class StaleKeys:
    """Keys and values of all tokens, stored for each attention call of this rank's blocks in one CFG branch.

    The first model call computes all tokens and stores their keys. Each later call computes one patch: it
    replaces the keys of that patch, and attends to all stored keys. The keys of earlier patches are from this
    step, the keys of later patches from the previous step. Attention to segments that are not split into
    patches, such as cross-attention to text, stays exact. Ranks that share a sequence exchange the keys of
    each patch once, and each stores all keys.
    """

    def __init__(self, hooks: PatchHooks) -> None:
        self._hooks = hooks
        # For each attention call in order: keys [B, H, S, D], values [B, H, S, D_v], and the mask of the keys
        # or None. Every model call must make the same attention calls in the same order.
        self._stored: list[tuple[Tensor, Tensor, Tensor | None]] = []
        # Number of attention calls of the current patch, and so the index of the next one in ``_stored``; 0
        # while all tokens are computed.
        self._calls = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of the stored keys and values."""
        return sum(key.nbytes + value.nbytes for key, value, _ in self._stored)

    def begin(self) -> None:
        """Start a model call. The first call must compute all tokens, and each later call a patch.

        Raise ``RuntimeError`` if the last patch made fewer attention calls than all tokens: it may have taken
        the keys of other calls.
        """
        if self._calls not in (0, len(self._stored)):
            self._raise_other_calls(self._calls)
        self._calls = 0

    def _raise_other_calls(self, count: int) -> NoReturn:
        raise RuntimeError(
            f"the model made {len(self._stored)} attention calls for all tokens, and {count} for a patch; PipeFusion "
            f"expects the same calls in each step. {_WAY_OUT}"
        )

    def attend(self, call: SdpaCall) -> Tensor:
        """Return the output of an attention call that was intercepted in eager code."""
        return self._attend(self._hooks.next_attention(), outer_attention, call)

    def attend_in_graph(self, index: int, call: SdpaCall) -> Tensor:
        """Return the output of a call in a compiled block, with plan entry ``index`` of
        ``PatchHooks.attentions``.
        """
        attention, module = self._hooks.attentions[index], self._hooks.module
        allow_skipped_attention(module)
        interception = interception_of(module)
        outer: SdpaHandler = SdpaCall.on_one_device
        if interception is not None:
            outer = interception.planned.copy_for_calls((attention,))
        return self._attend(attention, outer, call)

    def _attend(self, attention: Attention, attend_exactly: SdpaHandler, call: SdpaCall) -> Tensor:
        """Return the attention output of ``call``, whose query ``[B, H, S_local, D]`` holds this rank's patch
        tokens.

        ``attention`` is its plan entry. ``attend_exactly`` computes a call that has the keys of all tokens.
        Raise ``RuntimeError`` if the lengths do not fit the plan, the call is causal, the mask is not
        supported, or all tokens had fewer calls. Collective over the ranks that share a sequence.
        """
        executor, module = self._hooks.executor, self._hooks.module
        names = attention.keys or attention.queries
        if executor is None or not executor.splits(names):
            return attend_exactly(call)
        num_queries, key, value, mask = self._gather_keys(attention, call)
        segments, mesh = tuple(executor.segments.values()), executor.mesh
        try:
            of_keys = layout_of_segments(names, segments, mesh, key.shape[-2], "key")
            of_queries = layout_of_segments(attention.queries, segments, mesh, num_queries, "query")
        except ValueError as error:
            raise RuntimeError(f"PipeFusion computes a patch: {error} {_WAY_OUT}") from error
        if call.is_causal:
            raise RuntimeError(
                f"PipeFusion does not support causal attention to {' + '.join(names)}. {_WAY_OUT}"
            )
        # All tokens are computed as patch 0 of 1 (``Fusion._run_whole``).
        if mesh.ranks == 1:
            keys, values = (x.detach().clone(memory_format=torch.contiguous_format) for x in (key, value))
            stored_mask = mask
            if mask is not None:
                stored_mask = mask.detach().clone()
            self._stored.append((keys, values, stored_mask))
            return attend_exactly(call)
        if self._calls == len(self._stored):
            self._raise_other_calls(self._calls + 1)
        all_keys, all_values, stored_mask = self._stored[self._calls]
        self._calls += 1
        mask = _mask_of_patch(mask, of_queries.runs(mesh.rank), stored_mask, key.shape[-2], of_keys.total)
        runs = of_keys.runs(mesh.rank)
        write_runs(all_keys, key, -2, runs)
        write_runs(all_values, value, -2, runs)
        if mask is not None and stored_mask is not None and mask.shape[-1] != of_keys.total:
            write_runs(stored_mask, mask, -1, runs)
            mask = stored_mask
        allow_skipped_attention(module)
        return call.with_tensors(call.query, all_keys, all_values, mask).on_one_device()

    def _gather_keys(self, attention: Attention, call: SdpaCall) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """Return the number of queries of all sequence ranks, and their keys, values and mask after one
        exchange. Collective.
        """
        query, key, value, mask = call.query, call.key, call.value, call.attn_mask
        current = segments_under_way(self._hooks.module)
        if current is None:
            return query.shape[-2], key, value, mask
        mesh, segments = current
        of_queries, of_keys = planned_layouts(attention, segments, mesh, query.shape[-2], key.shape[-2])
        if mask is not None and mask.shape[-2] != 1:
            raise RuntimeError(
                f"an attention call on {mesh.ranks} sequence ranks has a mask {list(mask.shape)}; PipeFusion "
                f"supports only masks of keys there. {_WAY_OUT}"
            )
        if mask is not None and mask.shape[-1] == key.shape[-2] != of_keys.total:
            mask = gather_tokens(mask, -1, of_keys, mesh)
        both = gather_tokens(torch.cat([key, value], dim=1), -2, of_keys, mesh)
        key, value = both.split([key.shape[1], value.shape[1]], dim=1)
        return of_queries.total, key, value, mask


def _mask_of_patch(
    mask: Tensor | None, queries: Sequence[Run], stored: Tensor | None, num_keys: int, total: int
) -> Tensor | None:
    """Return the rows of ``mask`` for the ``queries`` of a patch, runs (first index, length); None without
    masks.

    The columns of ``mask`` are the ``total`` keys, or the ``num_keys`` of this patch. ``stored`` is the mask
    of the first call, which computed all tokens. Raise ``RuntimeError`` if the masks are not of a supported
    shape.
    """
    if mask is None and stored is None:
        return None
    num_queries = sum(length for _, length in queries)
    if mask is not None and stored is not None and mask.shape[-1] in (total, num_keys):
        if mask.shape[-2] == 1 or (mask.shape[-1] == total and mask.shape[-2] == num_queries):
            return mask
        if mask.shape[-1] == total and mask.shape[-2] == stored.shape[-2]:
            return torch.cat([mask.narrow(-2, *run) for run in queries], dim=-2)
    of_patch, of_all = _describe_mask(mask), _describe_mask(stored)
    raise RuntimeError(
        f"an attention call of a patch with {num_queries} queries and {num_keys} of {total} keys has {of_patch}; "
        f"with all tokens it had {of_all}. PipeFusion supports masks of keys. {_WAY_OUT}"
    )


def _describe_mask(mask: Tensor | None) -> str:
    if mask is None:
        return "no mask"
    return f"a mask {list(mask.shape)}"
