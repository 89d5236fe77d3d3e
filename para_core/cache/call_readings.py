"""The readings of the calls of a model with a cache, from which the report is made.

``report.py`` makes them for a cache, which calls ``begin`` and ``end`` around each call of its model. Tests:
tests/cache/test_report.py.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from para_core.cache.decision import DecisionOutcome

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache


@dataclass
class CallReading:
    """The values of one model call that the report needs. Reading its tensors or seconds may wait for the
    device.

    Args:
        branch: The name of the branch, or one name for all branches in the batch.
        num_branches, batch: Number of branches and number of samples in the batch, over all ranks; ``batch``
            is 0 if unknown.
        threshold_decides: Whether the threshold decides, and not a policy.
        room: Maximum number of stored residuals, and therefore of residuals in a forecast.
        events: The begin and the end of the call on a CUDA device.
        start, host_seconds: The time of the begin, and the duration, on the host.
        outcome: The outcome of the decision; that of the call before until the call has ended.
    """

    step: int
    branch: str
    num_branches: int
    batch: int
    threshold: float
    threshold_decides: bool
    room: int
    events: tuple[Any, ...]
    start: float
    outcome: DecisionOutcome
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the call. If a CUDA device measured it, the host waits for the device."""
        if not self.events:
            return self.host_seconds
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


# Maximum number of model calls whose readings are kept for the report. A pipeline clears the readings before
# every generation, but a loop that never calls reset_cache would otherwise accumulate them, and their tensors
# on a GPU, without limit.
MOST_READINGS = 4096


class CallReadings:
    """The readings of the last ``MOST_READINGS`` model calls since :meth:`clear`, of one cache.

    Attributes:
        calls: The readings, oldest first.
        count: Number of calls.
    """

    def __init__(self) -> None:
        self.calls: deque[CallReading] = deque(maxlen=MOST_READINGS)
        self.count = 0
        # The reading that begin() made. A call that raises never ends, and the next one replaces it.
        self._current: CallReading
        self._device: torch.device

    @property
    def dropped(self) -> int:
        """The number of calls whose readings were dropped."""
        return self.count - len(self.calls)

    def begin(self, cache: BlockCache, branch: str, device: torch.device) -> None:
        """Start to measure a call. Called after ``cache.step`` is set, and before the first block runs."""
        self._device = device
        events: tuple[Any, ...] = ()
        if device.type == "cuda":
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            # The current stream of the process may be that of another device.
            events[0].record(torch.cuda.current_stream(device))
        self._current = CallReading(
            step=cache.step.index,
            branch=branch,
            num_branches=cache.num_branches,
            batch=cache.batch,
            threshold=cache.threshold,
            threshold_decides=cache.options.policy is None,
            room=cache.options.chosen_forecast.num_residuals,
            events=events,
            start=time.perf_counter(),
            outcome=cache.outcome,
        )

    def end(self, outcome: DecisionOutcome) -> None:
        """Keep the reading of the call that began last."""
        reading = self._current
        reading.host_seconds = time.perf_counter() - reading.start
        if reading.events:
            reading.events[1].record(torch.cuda.current_stream(self._device))
        reading.outcome = outcome
        self.calls.append(reading)
        self.count += 1

    def clear(self) -> None:
        """Drop all readings."""
        self.calls.clear()
        self.count = 0
