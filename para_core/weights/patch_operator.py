"""Attention of a patch as one opaque operator: what compiled blocks call, whose graphs know nothing of keys that are held.

Which patch it is, and what its tokens attend to, is asked when it runs (:func:`attending_by`): graphs are the same for all patches
of a length, and for all blocks of a kind.
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

# Computes a call of the attention of this number.
PatchHandler = Callable[[int, SdpaCall], Tensor]


class _ThreadState(threading.local):
    """What computes attention of patches in this thread, the innermost last."""

    def __init__(self) -> None:
        self.attending: list[PatchHandler] = []


_THREAD_STATE = _ThreadState()


@contextmanager
def attending_by(attend: PatchHandler) -> Iterator[None]:
    """Inside, in this thread, ``attend(kind, call)`` computes the operator."""
    _THREAD_STATE.attending.append(attend)
    try:
        yield
    finally:
        _THREAD_STATE.attending.pop()


class PatchAttnMode(TorchFunctionMode):
    """Makes an operator of each attention call, in graphs and in eager code.

    Args:
        kinds: of the first, second, … call; the last stands for all further ones.
    """

    def __init__(self, kinds: tuple[int, ...]) -> None:
        super().__init__()
        self._kinds, self._calls = kinds, 0

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
            "a block that was compiled under PipeFusion was called on its own. Call the pipeline; or unparallelize_pipe(pipe) first."
        )
    call = SdpaCall(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    out = _THREAD_STATE.attending[-1](kind, call)
    # As the graph expects it, and as SDPA mostly gives it: [B, S, H, D] in memory.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, done(out)


def _shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)


# It holds keys, and ranks that share a patch exchange them: in program order, and never left out.
define_collective(
    "patch_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float? scale, bool enable_gqa, "
    "int kind, Tensor? after=None) -> (Tensor, Tensor)",
    _patch_attention,
    _shape,
)
