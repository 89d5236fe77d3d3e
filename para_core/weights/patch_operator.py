"""Attention of a patch as one opaque operator for compiled blocks, whose graphs contain no stored keys.

The patch, and the stored keys, are looked up when the operator runs (:func:`attending_by`), so that one graph serves
all patches of equal length and all blocks of equal kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.collectives import define_collective, done
from para_core.modes.interceptor import intercept
from para_core.torch_internals import no_frame_of_its_own

# Computes an attention call, given the index of its kind.
PatchHandler = Callable[[int, SdpaCall], Tensor]


class _ThreadState(threading.local):
    """The handlers of patch attention in this thread, the innermost last."""

    def __init__(self) -> None:
        self.attending: list[PatchHandler] = []


_THREAD_STATE = _ThreadState()


@contextmanager
def attending_by(attend: PatchHandler) -> Iterator[None]:
    """Let ``attend(kind, call)`` compute the operator in this thread while the block runs."""
    _THREAD_STATE.attending.append(attend)
    try:
        yield
    finally:
        _THREAD_STATE.attending.pop()


class PatchAttnMode(TorchFunctionMode):
    """A mode that turns each attention call into the operator, in graphs and in eager code.

    Args:
        kinds: The kind of the first, second, … call. The last one is that of all further calls.
    """

    def __init__(self, kinds: tuple[int, ...]) -> None:
        super().__init__()
        self._kinds, self._calls = kinds, 0

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return intercept(self, self._attend, 1, func, args, kwargs or {})

    def _attend(self, call: SdpaCall) -> Tensor:
        kind = self._kinds[min(self._calls, len(self._kinds) - 1)]
        if len(self._kinds) > 1:
            self._calls += 1
        out: Tensor = torch.ops.para_core.patch_attention(*call[:8], kind)[0]
        return out


def _patch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kind: int,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if not _THREAD_STATE.attending:
        raise RuntimeError(
            "a block that was compiled under PipeFusion was called on its own. Call the pipeline; or "
            "unparallelize_pipe(pipe) first."
        )
    call = SdpaCall(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    out = _THREAD_STATE.attending[-1](kind, call)
    # The memory layout that the fake kernel states: [B, S, H, D].
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, done(out)


def _shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)


# A collective, because ranks that share a patch exchange keys: the operator must keep its order and must not be
# removed.
define_collective(
    "patch_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float? "
    "scale, bool enable_gqa, int kind, Tensor? after=None) -> (Tensor, Tensor)",
    _patch_attention,
    _shape,
)
