"""The changes that parallelize_pipe makes to a pipeline's call: wrapper, PipeFusion and attention schedule.

Each change is a part of a *session*: all changes that are applied to one pipeline and undone together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.scheduled_attention import ScheduledAttention
from para_core.adapters.parallel.session import Part, Undo
from para_core.adapters.registry import transformers_of
from para_core.adapters.weights.fused_pipe import FusedPipe
from para_core.adapters.weights.staged_transformer import refuse_late_on_pipe, release_pipe
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_schedule import AttentionSchedule
from para_core.instance_patching import original_class
from para_core.weights.pipefusion import PipeFusion


@dataclass(frozen=True)
class CallPart(Part):
    """The change by which parallelize_pipe wraps the pipeline's ``__call__``."""

    pipe: Any
    call: ParallelCall
    name = "the pipeline"

    def apply(self) -> Undo:
        self.call.attach(self.pipe)
        if self.call.mesh.pipe.size > 1:
            refuse_late_on_pipe(self.pipe)
        return self.undo

    def undo(self) -> None:
        remove_parallel_call(self.pipe)
        release_pipe(self.pipe)


@dataclass(frozen=True)
class PipeFusionPart(Part):
    """The change by which parallelize_pipe turns on PipeFusion for the staged transformers."""

    call: ParallelCall
    transformers: Mapping[str, nn.Module]
    options: PipeFusion
    adapter: Adapter | None
    name = "PipeFusion"

    def apply(self) -> Undo:
        fused = FusedPipe(self.transformers, self.options, self.call.mesh, self.adapter)
        self.call.fused = fused
        return fused.remove


@dataclass(frozen=True)
class SchedulePart(Part):
    """The change by which parallelize_pipe sets the attention backend of each denoising step from a schedule.

    ``options`` are the attention options of the transformers; their ``backend`` is replaced at each step.

    Raises:
        ValueError: If ``pipe`` has no scheduler whose steps could be counted.
    """

    pipe: Any
    call: ParallelCall
    schedule: AttentionSchedule
    options: AttnOptions
    adapter: Adapter | None
    name = "the schedule of attention"

    def __post_init__(self) -> None:
        if getattr(self.pipe, "scheduler", None) is None:
            raise ValueError(
                f"backend= is an AttentionSchedule, and this {original_class(self.pipe).__name__} has no scheduler "
                "whose steps could be counted. Name one backend for all steps."
            )

    def apply(self) -> Undo:
        self.call.scheduled = ScheduledAttention(transformers_of(self.pipe), self.schedule, self.options, self.adapter)
        return partial(self.call.scheduled.remove, self.pipe)
