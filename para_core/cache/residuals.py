"""What is stored of one branch from step to step, and what is forecast from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.cache.decision import Decider
from para_core.cache.operators import forecast

# Of the streams of a group: what its blocks are given, or return; None where they return None.
Streams = tuple[Tensor | None, ...]


class Residuals:
    """Of the streams of one group, over its skipped blocks, at the last computed steps.

    Args:
        room: so many are stored of each stream.

    Attributes:
        histories: of each stream, newest first; None where the blocks return None. Empty until a step was computed.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.histories: list[list[Tensor] | None] = []

    def begin(self, entries: Streams, outputs: Streams, room: int = 1) -> None:
        """Store the first ones. In a graph all have their ``room`` from then on; those not known yet weigh nothing."""
        new = [_residual(x, y) for x, y in zip(outputs, entries, strict=True)]
        self.histories.extend(
            [None if x is None else [x, *[torch.zeros_like(x) for _ in range(room - 1)]] for x in new]
        )

    def store(self, entries: Streams, outputs: Streams) -> None:
        """Those of a computed step; the oldest go."""
        for history, x, entry in zip(self.histories, outputs, entries, strict=True):
            residual = _residual(x, entry)
            if history is not None and residual is not None:
                history.insert(0, residual)
                del history[self.room :]

    def store_unless(self, skip: Tensor, entries: Streams, outputs: Streams) -> None:
        """The same in a graph, in place."""
        for history, x, entry in zip(self.histories, outputs, entries, strict=True):
            residual = _residual(x, entry)
            if history is None or residual is None:
                continue
            for older, newer in zip(reversed(history[1:]), reversed(history[:-1]), strict=True):
                older.copy_(torch.where(skip, older, newer))
            history[0].copy_(torch.where(skip, history[0], residual))

    def forecast(self, entries: Streams, weights: list[Any]) -> Streams:
        """What the skipped blocks are taken to return."""
        return tuple([_added(x, history, weights) for x, history in zip(entries, self.histories, strict=True)])

    def tensors(self) -> list[Tensor]:
        return [x for history in self.histories for x in history or ()]


class BranchState:
    """What is held of one branch; empty until a step was computed.

    Args:
        num_groups: of the block stack.
        room: so many residuals are stored of each stream.

    Attributes:
        decider: what holds the first-block residual, and counts; of tensors if a graph made it.
        signature: shapes, dtypes and devices of what the model was called with.
    """

    def __init__(self, num_groups: int, room: int) -> None:
        self.room = room
        self.groups = [Residuals(room) for _ in range(num_groups)]
        self.decider: Decider | None = None
        self.signature: object = None

    def leave_graph(self) -> None:
        """Copy all tensors, which a graph has returned: the next replay of a CUDA graph overwrites its outputs.

        Once for each branch and generation: later graphs change the copies in place.
        """
        if self.decider is not None:
            self.decider.leave_graph()
        for group in self.groups:
            group.histories = [None if history is None else [x.clone() for x in history] for history in group.histories]

    def clear(self) -> None:
        """Forget everything, and let its memory go."""
        self.decider, self.signature = None, None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the residuals."""
        for group in self.groups:
            group.histories = []

    def tensors(self) -> list[Tensor]:
        """All that it holds, for counting memory."""
        kept = [x for group in self.groups for x in group.tensors()]
        return [*([] if self.decider is None else [self.decider.first]), *kept]


def _residual(output: Tensor | None, entry: Tensor | None) -> Tensor | None:
    return None if output is None or entry is None else output.detach() - entry.detach()


def _added(entry: Tensor | None, history: list[Tensor] | None, weights: list[Any]) -> Tensor | None:
    if entry is None or history is None:
        return None
    pairs = list(zip(weights, history, strict=False))
    if not any(isinstance(weight, Tensor) for weight, _ in pairs):
        return forecast(entry, [residual for _, residual in pairs], [weight for weight, _ in pairs])
    total = entry
    for weight, residual in pairs:
        total = total + (weight * residual).to(entry.dtype)
    return total
