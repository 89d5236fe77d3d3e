"""What is stored of one branch from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

# The residuals of one stream of a stage over its skipped blocks, newest first; None where the blocks return None.
History = list[Tensor] | None


@dataclass
class BranchState:
    """Empty until a step was computed.

    Args:
        first: the first-block residual that the next one is compared with, sampled.
        stages: of each stage, of each of its streams, the residuals of the last computed steps.
        traced: whether a compiled graph made it; its tensors are then changed in place.
        calls, hits_in_a_row: calls so far, and hits since the last computed one.
        times: of the last computed steps, newest first.
        numbers: in a graph, in place of these: calls, hits in a row, computed calls, times; float64.
        signature: shapes, dtypes and devices of what the model was called with.
    """

    first: Tensor | None = None
    stages: list[list[History]] = field(default_factory=list)
    traced: bool = False
    calls: int = 0
    hits_in_a_row: int = 0
    times: list[float] = field(default_factory=list)
    numbers: Tensor | None = None
    signature: object = None

    def clear(self) -> None:
        """Forget everything, and let its memory go."""
        self.first, self.stages, self.traced = None, [], False
        self.calls, self.hits_in_a_row = 0, 0
        self.times, self.numbers, self.signature = [], None, None

    def tensors(self) -> list[Tensor]:
        """All that it holds, for counting memory."""
        kept = [x for stage in self.stages for history in stage for x in history or ()]
        return [*([] if self.first is None else [self.first]), *kept]
