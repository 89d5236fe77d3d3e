"""Record one model call on each rank, and find the first module whose output differs between the recordings.

A recording has digests (shape, dtype and random projections) of all tensors that modules and attention calls get and
return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall
from para_core.dataclass_fields import leaves_of
from para_core.instance.private_class import original_class
from para_core.layout.sequence import Segment
from para_core.modes.multi_head import multi_head_attention
from para_core.torch_internals import DisableTorchFunction
from para_core.verify.parts import relative_error, sharded_dim

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
        digests = tuple(_digest(x) for x in leaves_of(value) if isinstance(x, Tensor) and x.layout == torch.strided)
        self.events.append(Event(kind, module, digests, attention))

    def on_cpu(self) -> Recording:
        """Return a copy whose digests are on the CPU, so that it can be sent to another rank."""
        events = [
            replace(
                event, digests=tuple([replace(x, rows=tuple([row.cpu() for row in x.rows])) for x in event.digests])
            )
            for event in self.events
        ]
        return Recording(events, [*self.running])

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
            modes.append(AttentionRecorder(self))
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


class AttentionRecorder(TorchFunctionMode):
    """A mode that records attention calls in ``recording``, without changing them."""

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


@dataclass(frozen=True)
class Difference:
    """The first point at which a run on several ranks differs from a run of the unmodified model on one rank.

    Args:
        module (`str`): Name of the module, as in ``model.named_modules()``; "" for the model itself or for code
            outside of it.
        kind (`str`): Name of the module's class.
        reason (`str`): A description of the difference.
        facts (`tuple` of `str`, *optional*): Details for debugging: the module's attention calls, its settings that
            depend on lengths, and advice.
        error (`float`, *optional*): The estimated relative error of the tensors at this point; None if no tensors were
            compared.
    """

    module: str
    kind: str
    reason: str
    facts: tuple[str, ...] = ()
    error: float | None = None

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})"
        size = "" if self.error is None else f" (by {self.error:.1e})"
        return "\n".join([f"{name}: {self.reason}{size}", *[f"  {fact}" for fact in self.facts]])


def first_difference(
    module: nn.Module,
    alone: Recording,
    ranks: Sequence[Recording],
    segments: Sequence[Segment],
    *,
    tolerance: float,
    failure: str | None = None,
    failed: Recording | None = None,
) -> Difference:
    """Return the first difference, in order of time, between the recordings of the ranks and of the unmodified model.

    If all events agree, the result describes ``failure``, the error that ended the run on several ranks; without a
    failure it says that code outside of the modules differs.

    Args:
        module: The unmodified model.
        segments: The segments that were sharded or replicated.
        tolerance: The largest relative error that counts as equal.
        failed: The recording of the rank that failed. The others may merely have waited for it.
    """
    describe = partial(_described, module, [alone, *ranks])
    running: list[str] = []
    for event, *parts in zip(*_comparable([alone, *ranks]), strict=False):
        if any((part.kind, part.module) != (event.kind, event.module) for part in parts):
            return describe(running, "on several ranks other modules run, or in another order")
        error = _largest_error(event, parts, segments)
        if error > tolerance:
            reason = _REASONS[event.kind].format(event.module or "the model")
            return describe(running if event.kind == "call" else [event.module], reason, error)
        if event.kind == "call":
            running.append(event.module)
        elif event.kind == "return" and event.module in running:
            del running[running.index(event.module) :]
    if failure is not None:
        # If modules of a recording have not returned, its rank failed in the innermost one.
        recordings = ranks if failed is None else [failed]
        return describe(next((recording.running for recording in recordings if recording.running), []), failure)
    return describe(
        [],
        "the outputs of all its modules agree; what differs is computed outside of them: before the first, after the "
        "last, or in the lines of forward=",
    )


_REASONS: dict[Kind, str] = {
    "call": "what it gives {} differs, though all that ran before agrees: it mixes tokens, or counts them",
    "return": "what it returns differs, though what it is given agrees: it mixes tokens, or counts them",
    "attention": "the query, key or value that it attends with differs: look at positions (rotary embeddings)",
    "attended": "its attention differs, though query, key and value agree: look at the mask",
}


def _comparable(recordings: Sequence[Recording]) -> list[list[Event]]:
    """Return the events of each recording, without the events of modules that are not called in every recording.

    Such modules exist if a user's ``forward`` function calls only parts of the model.
    """
    called = [{event.module for event in recording.events if event.kind == "call"} for recording in recordings]
    common = set.intersection(*called)
    return [
        [event for event in recording.events if event.module in common or event.kind in ("attention", "attended")]
        for recording in recordings
    ]


def _largest_error(event: Event, parts: Sequence[Event], segments: Sequence[Segment]) -> float:
    """Return the largest relative error of the tensors of ``event``, given the same event on each rank (``parts``).
    Tensors whose shapes do not fit count as equal.
    """
    if any(len(part.digests) != len(event.digests) for part in parts):
        return 0.0
    largest = 0.0
    for i, whole in enumerate(event.digests):
        # Skip tensors that may be masks [..., S_q, S_k]: a correct mask may have other numbers of rows or columns on a
        # rank, and a wrong mask shows in the attention output.
        shape, dtype = whole.shape, whole.dtype
        if dtype == torch.bool and len(shape) >= 2:
            continue
        if len(shape) == 4 and shape[1] == 1 and dtype.is_floating_point:
            continue
        # Skip two integers, which may be the cumulative lengths of a sequence: those of a rank are others.
        if shape == (2,) and not dtype.is_floating_point:
            continue
        dim = sharded_dim([part.digests[i].shape for part in parts], shape)
        if dim is not None:
            # The dim is -1 if all shapes are equal. Then compare along dim 0, because any dim will do.
            dim = max(dim, 0)
            error = relative_error([part.digests[i].rows[dim] for part in parts], whole.rows[dim], segments)
            largest = max(largest, error or 0.0)
    return largest


def _described(
    module: nn.Module, recordings: Sequence[Recording], running: Sequence[str], reason: str, error: float | None = None
) -> Difference:
    """Return the difference in the innermost of the ``running`` modules, with the facts that ``recordings`` give."""
    name = running[-1] if running else ""
    submodule = module.get_submodule(name)
    calls = [
        [event.attention for event in recording.events if event.module == name and event.attention is not None]
        for recording in recordings
    ]
    facts = []
    if calls[0]:
        facts.append(f"alone: {calls[0][0]}")
        facts += [f"rank {rank}: {of_rank[0]}" for rank, of_rank in enumerate(calls[1:]) if of_rank]
    whole, held = (calls[0][0].keys, max(of_rank[0].keys for of_rank in calls[1:])) if all(calls) else (0, 0)
    config = getattr(getattr(submodule, "config", None), "__dict__", {})
    for setting, value in {**vars(submodule), **{f"config.{key}": value for key, value in config.items()}}.items():
        # Settings of the module and of its config that may limit attention, such as windows.
        key = setting.removeprefix("config.")
        limits = "window" in key or "causal" in key or key in ("layer_type", "attention_type")
        if limits and isinstance(value, (bool, int, str, tuple)):
            fact = f"{setting} = {value!r}"
            if type(value) is int and held <= value < whole:
                fact += f": not shorter than a rank's part ({held} tokens), but shorter than the sequence ({whole})"
            facts.append(fact)
    facts += _advice(calls)
    return Difference(name, original_class(submodule).__name__, reason, tuple(facts), error)


def _advice(calls: Sequence[Sequence[AttentionRecord]]) -> list[str]:
    if not all(calls):
        return []
    alone, ranks = calls[0][0], [of_rank[0] for of_rank in calls[1:]]
    ways_out = "Pass a 4-D mask over all tokens, or let para_core.adapters.propose_plan find a plan."
    if alone.mask is not None and any(call.mask is None for call in ranks):
        reason = "The model makes its mask from the length that it is given, and makes none for a rank's part."
        return [f"{reason} {ways_out}"]
    if any(call.mask is not None and call.mask[-2] == call.queries != alone.queries for call in ranks):
        reason = "Its mask has a row for each token of a rank: if the model made it, rows count from 0 on every rank."
        return [f"{reason} {ways_out}"]
    if len({call.is_causal for call in (alone, *ranks)}) > 1:
        return ["is_causal is not the same on all ranks: some models switch it off for a single token."]
    return []
