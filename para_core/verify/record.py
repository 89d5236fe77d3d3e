"""Record digests (shape, dtype and random projections) of all tensors that modules and attention calls get and return
during one call of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.attention.multi_head import multi_head_attention
from para_core.attention.sdpa_call import SdpaCall
from para_core.torch_internals import DisableTorchFunction, tree_leaves

# Number of random vectors on which each slice of a tensor is projected.
_PROBES = 4
_LARGEST = 1e6

Kind = Literal["call", "return", "attention", "attended"]


@dataclass(frozen=True)
class Digest:
    """A summary of a tensor: shape, dtype, and random projections of its slices along each dim.

    ``rows[dim]`` has shape ``[size of dim, probes]``: the projections of each slice on ``probes`` random vectors. The
    projections preserve the ratio of two norms on average, so a rank's part can be compared with the whole tensor after
    both are freed. ``rows[0]`` of a 1-D tensor is ``[size, 1]``, the tensor itself. A 0-D tensor counts as one slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[Tensor, ...]


@dataclass(frozen=True)
class AttentionRecord:
    """The lengths, mask shape and ``is_causal`` of one call of ``scaled_dot_product_attention``."""

    queries: int
    keys: int
    mask: tuple[int, ...] | None
    is_causal: bool

    def __str__(self) -> str:
        mask = "no mask" if self.mask is None else f"mask {list(self.mask)}"
        return f"{self.queries} queries, {self.keys} keys, {mask}, is_causal={self.is_causal}"


@dataclass(frozen=True)
class Event:
    """The record of the start (``"call"``, ``"attention"``) or the end (``"return"``, ``"attended"``) of a module's
    call or of an attention call, with digests of its inputs or outputs.

    ``module`` is the module, or the innermost module that is running during the attention call.
    """

    kind: Kind
    module: str
    digests: tuple[Digest, ...]
    attention: AttentionRecord | None = None


@dataclass
class Recording:
    """The events of one model call on one rank, in order of time.

    Args:
        running: Names of the modules that have not returned, the innermost last.
        busy: Whether an attention call is being recorded at the moment.
        at_each_event: A function that is called before each event is recorded.
    """

    events: list[Event] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    busy: bool = False
    at_each_event: Callable[[], None] | None = None

    def note(self, kind: Kind, module: str, value: Any, attention: AttentionRecord | None = None) -> None:
        if self.at_each_event is not None:
            self.at_each_event()
        digests = tuple(_digest(x) for x in tree_leaves(value) if isinstance(x, Tensor) and x.layout == torch.strided)
        self.events.append(Event(kind, module, digests, attention))

    def notes_attention(self) -> TorchFunctionMode:
        """Return a mode that records attention calls without changing them."""
        return _AttentionRecorder(self)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Record the calls of ``module`` and of its submodules inside the ``with`` block, by hooks."""
        handles = [handle for name, submodule in module.named_modules() for handle in self._hooks(name, submodule)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, name: str, module: nn.Module) -> list[Any]:
        # The hook of every module enters the attention recorder again. A plan enters its own modes around some modules,
        # and only the innermost mode sees a call.
        modes: list[TorchFunctionMode] = []
        depths: list[int] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.note("call", name, (args, kwargs))
            depths.append(len(self.running))
            self.running.append(name)
            modes.append(self.notes_attention())
            modes[-1].__enter__()

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            modes.pop().__exit__(None, None, None)
            depth = depths.pop()
            # This hook also runs after the module raised. In that case keep ``running``, which shows the module that
            # failed.
            if output is not None or sys.exc_info()[0] is None:
                del self.running[depth:]
                self.note("return", name, output)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]


class _AttentionRecorder(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, recording = kwargs or {}, self._recording
        if func is F.multi_head_attention_forward and not recording.busy:
            # A mode is off inside a function that it handles. Therefore compute this function in parts, and record the
            # attention call among them.
            return multi_head_attention(self._record, *args, **kwargs)
        if func is not F.scaled_dot_product_attention or recording.busy:
            return func(*args, **kwargs)
        return self._record(SdpaCall(*args, **kwargs))

    def _record(self, sdpa: SdpaCall) -> Tensor:
        recording = self._recording
        mask = None if sdpa.attn_mask is None else tuple(sdpa.attn_mask.shape)
        call = AttentionRecord(sdpa.query.shape[-2], sdpa.key.shape[-2], mask, bool(sdpa.is_causal))
        name = recording.running[-1] if recording.running else ""
        # The recorders of outer modules see the same call. `busy` keeps these recorders from recording the call again.
        recording.busy = True
        try:
            recording.note("attention", name, sdpa[:3], call)
            out = sdpa.original()
            recording.note("attended", name, out, call)
        finally:
            recording.busy = False
        return out


def _digest(x: Tensor) -> Digest:
    with DisableTorchFunction():
        shape, dtype = tuple(x.shape), x.dtype
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x).sum(-1)
        if x.dtype != torch.float64:
            x = x.float()
        x = x.nan_to_num(nan=_LARGEST / 3).clamp(-_LARGEST, _LARGEST)
        x = x.reshape(1) if x.ndim == 0 else x
        return Digest(shape, dtype, tuple(_rows(x, dim) for dim in range(x.ndim)))


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return random projections of the slices of ``x`` along ``dim``, ``[size of dim, probes]``.

    All other dims are contracted with random vectors, one after the other.
    """
    x = x.movedim(dim, 0)
    if x.ndim == 1:
        return x[:, None]
    rows = x @ _noise(x.shape[-1], x)
    while rows.ndim > 2:
        rows = (rows * _noise(rows.shape[-2], rows)).sum(-2)
    return rows


def _noise(size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, _PROBES, generator=generator).to(like)
