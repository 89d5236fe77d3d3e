"""The attention of one PipeFusion patch as an opaque operator, so that a compiled block does not hold stored keys.

The operator calls the function that :func:`patch_attention_handler` has set. Therefore one graph serves all patches of
equal length, and all blocks with equal attention calls.
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

# A function that computes an attention call of a patch. Its int argument is the index in PatchHooks.attentions of the
# plan entry that describes the call.
PatchHandler = Callable[[int, SdpaCall], Tensor]


class _HandlerStack(threading.local):
    """The handlers that compute ``para_core::patch_attention`` in this thread, the innermost last."""

    def __init__(self) -> None:
        self.handlers: list[PatchHandler] = []


_THREAD = _HandlerStack()


@contextmanager
def patch_attention_handler(handler: PatchHandler) -> Iterator[None]:
    """Make ``handler`` compute ``para_core::patch_attention`` in this thread inside the ``with`` block."""
    _THREAD.handlers.append(handler)
    try:
        yield
    finally:
        _THREAD.handlers.pop()


class PatchAttnMode(TorchFunctionMode):
    """Mode that replaces attention calls by ``para_core::patch_attention``, in compiled graphs and in eager code.

    Args:
        indices: For the first, second, … attention call, the index of its plan entry in :attr:`PatchHooks.attentions`.
            The last index also applies to further calls.
    """

    def __init__(self, indices: tuple[int, ...]) -> None:
        super().__init__()
        self._indices, self._calls = indices, 0

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return intercept(self, self._call_operator, 1, func, args, kwargs or {})

    def _call_operator(self, call: SdpaCall) -> Tensor:
        index = self._indices[min(self._calls, len(self._indices) - 1)]
        if len(self._indices) > 1:
            self._calls += 1
        out: Tensor = torch.ops.para_core.patch_attention(*call[:8], index)[0]
        return out


def _patch_attention(*args: Any) -> tuple[Tensor, Tensor]:
    if not _THREAD.handlers:
        raise RuntimeError(
            "a block that was compiled under PipeFusion was called on its own. Call the pipeline; or "
            "unparallelize_pipe(pipe) first."
        )
    out = _THREAD.handlers[-1](args[8], SdpaCall(*args[:8]))
    # The memory order must be [B, S, H, D], because _output_shape promises these strides to the compiler.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, done(out)


def _output_shape(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return out, done(out)


# Define the operator as a collective, which a compiler neither reorders nor removes, because sequence ranks exchange
# keys in it.
define_collective(
    "patch_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float? "
    "scale, bool enable_gqa, int index, Tensor? after=None) -> (Tensor, Tensor)",
    _patch_attention,
    _output_shape,
)
