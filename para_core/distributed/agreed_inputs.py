"""Hooks on model calls (of plans, of UNets) that agree on their inputs, unless ``adapters/parallel/call.py`` has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

# A function of the arguments of a call, by name, that raises on every rank if they differ between ranks.
AgreeOnInputs = Callable[[Mapping[str, Any]], None]


class AgreesOnInputs(Protocol):
    """A hook on model calls that agrees on their arguments over the ranks, unless ``inputs_agreed`` is True."""

    inputs_agreed: bool


@contextmanager
def assume_agreed(hooks: Iterable[AgreesOnInputs | None]) -> Iterator[None]:
    """Set ``inputs_agreed`` of the ``hooks`` that are not None to True inside the ``with`` block, then
    restore it.

    Use this if the caller has agreed on the arguments with all ranks.
    """
    before = [(hook, hook.inputs_agreed) for hook in hooks if hook is not None]
    for hook, _ in before:
        hook.inputs_agreed = True
    try:
        yield
    finally:
        for hook, agreed in before:
            hook.inputs_agreed = agreed
