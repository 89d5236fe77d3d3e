"""The stored residuals of one CFG branch, and forecasts of the outputs of skipped blocks from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.cache.call_digest import CallDigest
from para_core.cache.cond import Streams
from para_core.cache.decision import NumberDecider, TensorDecider
from para_core.cache.forecasts import forecast


class Residuals:
    """The residuals (output minus input) of one group's skippable blocks at the last ``room`` computed steps.

    Attributes:
        histories: For each stream, the list of its residuals, newest first; empty if the blocks return the
            stream as it is, None if they return None for it. Empty before the first computed step.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.histories: list[list[Tensor] | None] = []

    def store(self, entries: Streams, outputs: Streams, *, in_graph: bool) -> None:
        """Store the residuals of a computed step, from the inputs and the outputs of the group.

        If later steps run in a compiled graph (``in_graph``), which needs a fixed number of tensors, zero
        tensors whose weight is 0 are placeholders for later residuals.
        """
        new = [_residual(x, y) for x, y in zip(outputs, entries, strict=True)]
        if not self.histories and not in_graph:
            pairs = zip(new, outputs, entries, strict=True)
            for residual, x, y in pairs:
                if x is not None and x is y:
                    self.histories.append([])
                elif residual is None:
                    self.histories.append(None)
                else:
                    self.histories.append([residual])
            return
        if not self.histories:
            for residual in new:
                if residual is None:
                    self.histories.append(None)
                else:
                    placeholders = [torch.zeros_like(residual) for _ in range(self.room - 1)]
                    self.histories.append([residual, *placeholders])
            return
        for history, residual in zip(self.histories, new, strict=True):
            if history is None or residual is None:
                continue
            if not history:
                # The blocks did not change the stream at earlier steps, so the earlier residuals are zero.
                history.extend([torch.zeros_like(residual) for _ in range(self.room - 1)])
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
        return tuple(
            [_add_residuals(x, history, weights) for x, history in zip(entries, self.histories, strict=True)]
        )


class CacheState:
    """The stored residuals of each block group, and the decider, of one CFG branch.

    ``decider`` is None before the first step. ``signature`` holds the shapes, dtypes and devices of the
    model's arguments for which the residuals are valid. ``last_call`` describes the last call, if a graph
    identifies branches.
    """

    def __init__(self, num_groups: int, room: int) -> None:
        self.groups = [Residuals(room) for _ in range(num_groups)]
        self.decider: NumberDecider | TensorDecider | None = None
        self.signature: object = None
        self.last_call: CallDigest | None = None

    def leave_graph(self) -> None:
        """Clone all tensors that a graph returned, before the next replay of a CUDA graph overwrites them.

        This is needed once per branch and generation, because later calls of the graph change the clones in
        place.
        """
        if isinstance(self.decider, TensorDecider):
            self.decider.leave_graph()
        for group in self.groups:
            histories: list[list[Tensor] | None] = []
            for history in group.histories:
                if history is None:
                    histories.append(None)
                else:
                    histories.append([x.clone() for x in history])
            group.histories = histories

    def clear(self) -> None:
        self.decider = None
        self.signature = None
        self.last_call = None
        self.drop_residuals()

    def drop_residuals(self) -> None:
        """Drop the residuals and keep the decider."""
        for group in self.groups:
            group.histories = []

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors, to count their memory."""
        kept = [x for group in self.groups for history in group.histories for x in history or ()]
        if self.decider is None:
            return kept
        return [self.decider.first, *kept]


def _residual(output: Tensor | None, entry: Tensor | None) -> Tensor | None:
    if output is None or entry is None:
        return None
    return output.detach() - entry.detach()


def _add_residuals(entry: Tensor | None, history: list[Tensor] | None, weights: list[Any]) -> Tensor | None:
    if entry is None or history is None:
        return None
    if not history:
        return entry
    if not isinstance(weights[0], Tensor):
        count = min(len(weights), len(history))
        return forecast(entry, history[:count], weights[:count])
    total = entry
    for weight, residual in zip(weights, history, strict=False):
        total = total + (weight * residual).to(entry.dtype)
    return total
