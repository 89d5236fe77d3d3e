"""The stored residuals of one CFG branch, and forecasts of the outputs of skipped blocks from them.

:mod:`.block_run` stores and forecasts in eager code; :mod:`.graph` stores in place, in a graph. The weights
of a forecast come from the decider. Tests: tests/cache/test_options.py, tests/cache/test_state.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from para_core.cache.residual_operators import forecast
from para_core.cache.streams import Streams


class Residuals:
    """The residuals (output minus input) of one group's skippable blocks at the last ``room`` computed steps.

    Which streams the blocks return as None is taken from the first computed step, and must not change.

    Attributes:
        histories: For each stream, the list of its residuals, newest first; empty if the blocks return the
            stream as it is, None if they return None for it. Empty before the first computed step.
        marks: What block_run.py compares at the first step, to see whether blocks write to their input.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.marks: list[int | Tensor] = []
        self.histories: list[list[Tensor] | None] = []

    def store(self, entries: Streams, outputs: Streams, *, in_graph: bool) -> None:
        """Store the residuals of a computed step, from the inputs and the outputs of the group.

        If later steps run in a compiled graph (``in_graph``), which needs a fixed number of tensors, zeros
        are placeholders for later residuals. The forecast gives them the weight 0 until they are computed.

        Raises:
            ValueError: The blocks return another tensor than they get for a stream of integers or bools.
        """
        is_first = not self.histories
        if is_first:
            self.histories = [[] for _ in outputs]
        for index, (output, entry) in enumerate(zip(outputs, entries, strict=True)):
            history = self.histories[index]
            if output is None or entry is None:
                if is_first:
                    self.histories[index] = None
                continue
            if history is None:
                continue
            if not (entry.is_floating_point() or entry.is_complex()):
                if output is not entry:
                    raise ValueError(
                        f"the cached blocks return another tensor of {entry.dtype} than they get, and residuals are of "
                        "real or complex numbers. Let them return this stream as it is, or name only other streams, "
                        "such as the field 'video.x' of a dataclass, in BlockGroup(streams=...)."
                    )
                continue
            if not history and not in_graph and output is entry:
                continue
            residual = output.detach() - entry.detach()
            if not history and (in_graph or not is_first):
                # The blocks did not change the stream at earlier steps, so the earlier residuals are zero.
                history.extend([torch.zeros_like(residual) for _ in range(self.room - 1)])
            history.insert(0, residual)
            del history[self.room :]

    def forecast(self, entries: Streams, weights: list[Any]) -> Streams:
        """Return the forecast outputs of the skipped blocks: their inputs ``entries`` plus weighted residuals.

        In a graph the weights may be tensors. The operator takes numbers, so plain operators then compute the
        same sum, which a compiler fuses.
        """
        outputs: list[Tensor | None] = []
        for entry, history in zip(entries, self.histories, strict=True):
            if entry is None or history is None:
                outputs.append(None)
            elif history and isinstance(weights[0], Tensor):
                total = entry
                for weight, residual in zip(weights, history, strict=True):
                    total = total + (weight * residual).to(entry.dtype)
                outputs.append(total)
            elif history:
                count = min(len(weights), len(history))
                outputs.append(forecast(entry, history[:count], weights[:count]))
            else:
                outputs.append(entry)
        return tuple(outputs)


class CacheState:
    """The stored residuals of each block group, and the decider, of one CFG branch.

    Attributes:
        decider: A :class:`~para_core.cache.decision.NumberDecider`, or that of a graph; None before the first
            step.
        signature: The shapes, dtypes and devices of the model's arguments for which the residuals are valid.
        last_call: What a graph keeps of the last call, to tell branches apart.
    """

    def __init__(self, num_groups: int, room: int) -> None:
        self.groups = [Residuals(room) for _ in range(num_groups)]
        self.decider: Any = None
        self.signature: object = None
        self.last_call: Any = None

    def clear(self) -> None:
        """Drop everything."""
        self.decider = None
        self.signature = None
        self.last_call = None
        self.drop_residuals()

    def drop_residuals(self) -> None:
        """Drop the residuals and keep the decider."""
        for group in self.groups:
            group.histories = []

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors of the size of activations, to count their memory. The few numbers that a
        graph stores are left out.
        """
        kept = [x for group in self.groups for history in group.histories for x in history or ()]
        if self.decider is None:
            return kept
        return [self.decider.first, *kept]
