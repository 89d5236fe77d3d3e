"""A record of a model call on one rank that can be compared with those of other ranks.

It keeps digests, no tensors. The events come from :mod:`para_core.recorder.recorder`; :mod:`.difference`
compares the records. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from para_core.comparison.digests import Digest, digest
from para_core.dataclass_fields import leaves_of
from para_core.recorder.events import AttentionEnd, AttentionStart, Event, ModuleEnd, ModuleStart
from para_core.recorder.recorder import Recorder

EntryKind = Literal["call", "return", "attention", "attended"]


@dataclass(frozen=True)
class AttentionRecord:
    """The lengths, mask shape and ``is_causal`` of one attention call.

    Of a call that is no SDPA, such as ``flex_attention``, only the lengths are known, and ``function`` is its
    name.
    """

    queries: int
    keys: int
    mask: tuple[int, ...] | None
    is_causal: bool
    function: str = ""

    def __str__(self) -> str:
        if self.function:
            return f"{self.queries} queries, {self.keys} keys, in {self.function}"
        mask = "no mask"
        if self.mask is not None:
            mask = f"mask {list(self.mask)}"
        return f"{self.queries} queries, {self.keys} keys, {mask}, is_causal={self.is_causal}"


@dataclass(frozen=True)
class RecordEntry:
    """The start (``"call"``, ``"attention"``) or the end (``"return"``, ``"attended"``) of a call of a
    module, or of an attention call, with digests of its inputs or outputs.

    ``module`` is the module, or the innermost module that is running during the attention call.
    """

    kind: EntryKind
    module: str
    digests: tuple[Digest, ...]
    attention: AttentionRecord | None = None


@dataclass
class CallRecord:
    """The digests of what the modules and attention calls of one model call got and returned, in order of
    time.

    Args:
        entries: An entry for each start and each end.
        running: Names of the modules that have not returned, the innermost last. During the call this is the
            list of the recorder, which changes it, so it names the modules in which a call failed.
    """

    entries: list[RecordEntry] = field(default_factory=list)
    running: list[str] = field(default_factory=list)

    def to_cpu(self) -> CallRecord:
        """Return a copy whose digests are on the CPU, so that it can be sent to another rank."""
        entries = [
            replace(entry, digests=tuple([x.to_cpu() for x in entry.digests])) for entry in self.entries
        ]
        return CallRecord(entries, [*self.running])


@contextmanager
def record_call(
    module: nn.Module, record: CallRecord, *, before_entry: Callable[[], None] | None = None
) -> Iterator[Recorder]:
    """Record the calls of ``module`` and of its submodules inside the ``with`` block in ``record``.

    Args:
        module: The model, in eager code.
        record: Gets the entries, and the list of running modules of the recorder in place of its own.
        before_entry: Called before each entry is added.

    Yields:
        The recorder. Enter it again inside a mode in which functions outside of modules call attention.
    """

    def add(event: Event) -> None:
        entry = _entry_of(event)
        if entry is None:
            return
        if before_entry is not None:
            before_entry()
        record.entries.append(entry)

    recorder = Recorder(add)
    record.running = recorder.running
    with recorder.watch(module):
        yield recorder


def _entry_of(event: Event) -> RecordEntry | None:
    """Return the entry for ``event``; None for functions and operators."""
    match event:
        case ModuleStart():
            return RecordEntry("call", event.name, _digests((event.args, event.kwargs)))
        case ModuleEnd():
            return RecordEntry("return", event.name, _digests(event.output))
        case AttentionStart():
            inputs = (event.call.query, event.call.key, event.call.value)
            return RecordEntry("attention", event.name, _digests(inputs), _record_attention(event))
        case AttentionEnd():
            return RecordEntry("attended", event.name, _digests(event.output), _record_attention(event))
    return None


def _digests(value: Any) -> tuple[Digest, ...]:
    """Return the digests of the strided tensors in ``value``, in order. Sparse and nested tensors are not compared."""
    tensors = [x for x in leaves_of(value) if isinstance(x, Tensor) and x.layout == torch.strided]
    return tuple([digest(x) for x in tensors if not x.is_nested])


def _record_attention(event: AttentionStart | AttentionEnd) -> AttentionRecord:
    """Return the lengths and the mask of the attention call of ``event``."""
    call, mask, function = event.call, None, ""
    if call.attn_mask is not None:
        mask = tuple(call.attn_mask.shape)
    if not event.is_sdpa:
        function = getattr(event.function, "__name__", str(event.function))
    return AttentionRecord(
        queries=call.query.shape[-2],
        keys=call.key.shape[-2],
        mask=mask,
        is_causal=bool(call.is_causal),
        function=function,
    )
