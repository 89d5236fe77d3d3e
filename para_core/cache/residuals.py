"""The stored residuals of one CFG branch, and forecasts of the outputs of skipped blocks from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.cache.cond import Streams
from para_core.cache.decision import NumberDecider, TensorDecider
from para_core.cache.operators import forecast


class Residuals:
    """The residuals (output minus input) of one group's skippable blocks at the last computed steps.

    Args:
        room: Maximum number of residuals per stream.

    Attributes:
        histories: For each stream, the list of its residuals, newest first; None if the blocks return None for the
            stream. Empty before the first computed step.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.histories: list[list[Tensor] | None] = []

    def store(self, entries: Streams, outputs: Streams, *, in_graph: bool) -> None:
        """Store the residuals of a computed step. The last ``self.room`` residuals of each stream are kept.

        Args:
            entries: The inputs of the group.
            outputs: The outputs of the group.
            in_graph: Whether later steps run in a compiled graph. A graph needs a fixed number of tensors
                (``self.room``), so zero tensors, whose weight is 0, are placeholders for later residuals.
        """
        new = [_residual(x, y) for x, y in zip(outputs, entries, strict=True)]
        if not self.histories:
            later = range(self.room - 1 if in_graph else 0)
            self.histories.extend([None if x is None else [x, *[torch.zeros_like(x) for _ in later]] for x in new])
            return
        for history, residual in zip(self.histories, new, strict=True):
            if history is not None and residual is not None:
                history.insert(0, residual)
                del history[self.room :]

    def store_unless(self, skip: Tensor, entries: Streams, outputs: Streams) -> None:
        """Store the residual ``outputs - entries`` in place, in a graph, unless the bool tensor ``skip`` is True."""
        for history, x, entry in zip(self.histories, outputs, entries, strict=True):
            residual = _residual(x, entry)
            if history is None or residual is None:
                continue
            for older, newer in zip(reversed(history[1:]), reversed(history[:-1]), strict=True):
                older.copy_(torch.where(skip, older, newer))
            history[0].copy_(torch.where(skip, history[0], residual))

    def forecast(self, entries: Streams, weights: list[Any]) -> Streams:
        """Return the forecast outputs of the skipped blocks: their inputs ``entries`` plus weighted residuals."""
        return tuple([_added(x, history, weights) for x, history in zip(entries, self.histories, strict=True)])

    def tensors(self) -> list[Tensor]:
        return [x for history in self.histories for x in history or ()]


class CacheState:
    """The stored residuals and the decider of one CFG branch.

    Args:
        num_groups: Number of block groups.
        room: Maximum number of residuals per stream.

    Attributes:
        groups: The residuals of each block group.
        decider: The object that decides whether steps are skipped. None before the first step.
        signature: The shapes, dtypes and devices of the model's arguments, for which the residuals are valid.
    """

    def __init__(self, num_groups: int, room: int) -> None:
        self.room = room
        self.groups = [Residuals(room) for _ in range(num_groups)]
        self.decider: NumberDecider | TensorDecider | None = None
        self.signature: object = None

    def leave_graph(self) -> None:
        """Clone all stored tensors that a graph returned, because the next replay of a CUDA graph overwrites them.

        This is needed once per branch and generation, because later calls of the graph change the clones in place.
        """
        if isinstance(self.decider, TensorDecider):
            self.decider.leave_graph()
        for group in self.groups:
            group.histories = [None if history is None else [x.clone() for x in history] for history in group.histories]

    def clear(self) -> None:
        """Drop the residuals, the decider and the signature."""
        self.decider, self.signature = None, None
        self.drop_residuals()

    def drop_residuals(self) -> None:
        """Drop the residuals and keep the decider."""
        for group in self.groups:
            group.histories = []

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors, to count their memory."""
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
