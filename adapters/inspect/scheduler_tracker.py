"""Find the denoising step of a running pipeline, from the calls of its scheduler.

Caches, PipeFusion and schedules of attention each have a tracker, and follow a generation with it. Tests:
tests/cache/test_schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot

# Schedulers that list the end of the schedule as the last timestep, at which pipelines take no step.
_END_IS_LISTED = ("LTXEulerAncestralRFScheduler",)


class SchedulePosition(NamedTuple):
    """A step: its index in the call of the pipeline, the number of steps of that call, and its timestep.

    The timestep is on the scheduler's own scale; 0.0 if the scheduler lists none.
    """

    step: int
    num_steps: int
    time: float


class SchedulerTracker:
    """Counts the steps of a pipeline's scheduler while the pipeline runs.

    A step is a call of ``scheduler.step`` that advances the scheduler. So a scheduler that calls the model
    twice per timestep (Heun) has twice as many steps. A pipeline may begin after the first timestep (image to
    image, video to video). Diffusion forcing pipelines step with copies of the scheduler, one for each frame
    (:attr:`Adapter.steps_with_copies <para_core.adapters.adapter.Adapter>`); then model calls per CFG branch
    are counted.
    """

    def __init__(self) -> None:
        # Whether a pipeline runs inside follow(). The owners of a tracker read it: otherwise there is no
        # step.
        self.active = False
        # The key is unique, because a pipeline may have several trackers, which wrap the same scheduler.
        self._name = str(id(self))
        self._pipe: Any = None
        self._scheduler: Any = None
        self._with_copies = False
        self._begin: Callable[[], None] = lambda: None
        # Number of steps that the scheduler has taken in the current schedule.
        self._num_taken = 0
        # ``scheduler.step_index`` after the last step; None if the scheduler has no such attribute.
        self._step_index: int | None = None
        # The timestep of the last step, its address in memory or its number, and whether the model was called
        # since. The timestep itself is kept, because another tensor could be made at the address of a freed one.
        self._last_time: object = None
        self._last_address: object = None
        self._called = False
        # Whether the scheduler stepped twice at one timestep, with a model call in between.
        self._repeats = False
        # Used only if copies of the scheduler take the steps: number of model calls by CFG branch, and number
        # of steps in the current section of the video.
        self._num_calls: dict[str, int] = {}
        # 0 before the first model call of a schedule.
        self._section = 0
        # Timesteps are read once per schedule, because reading them from an accelerator makes the host wait.
        # Empty until then.
        self._times: list[float] = []

    @contextmanager
    def follow(self, pipe: Any, begin: Callable[[], None], *, with_copies: bool = False) -> Iterator[None]:
        """Make :meth:`next_position` available inside the ``with`` block, in which ``pipe`` runs.

        ``begin`` is called each time a schedule begins: some pipelines run one schedule per section of a
        video. ``with_copies`` says whether the pipeline may step with copies of its scheduler, so that model
        calls are counted. Raises ``RuntimeError`` if this tracker already follows a pipeline, in another
        thread or around this call.
        """
        if self.active:
            raise RuntimeError(
                "this pipeline is already running, in another thread or around this call (a callback calls it again). "
                "Both calls would use the same cache, or the same steps of a schedule. Use one thread and no nested "
                "call, or a pipeline for each."
            )
        scheduler = getattr(pipe, "scheduler", None)
        self._pipe, self._scheduler, self._begin, self._with_copies = pipe, scheduler, begin, with_copies
        self.active = True
        self._restart()

        try:
            if scheduler is not None:
                methods = {"step": self._count_step, "set_timesteps": self._begin_schedule}
                fill_slot(scheduler, Slot.SCHEDULER_TRACKER, methods, name=self._name, permits_copies=True)
            yield
        finally:
            if scheduler is not None:
                empty_slot(scheduler, Slot.SCHEDULER_TRACKER, self._name)
            self.active, self._scheduler, self._pipe, self._begin = False, None, None, lambda: None

    def _count_step(self, call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``scheduler.step``, and count it if it advances the scheduler."""
        # step(model_output, timestep, sample, …)
        if len(args) > 1:
            time = args[1]
        else:
            time = kwargs.get("timestep")
        # Second-order schedulers list a timestep twice, at two addresses.
        address = time
        if isinstance(time, torch.Tensor):
            address = time.data_ptr()
        repeats = self._called and address is not None and address == self._last_address
        self._repeats = self._repeats or repeats
        self._last_time, self._last_address, self._called = time, address, False
        output = call(scheduler, *args, **kwargs)
        # Cosmos 1 steps to a clean sample, resets the step index and takes the same step again. Count it
        # once.
        step_index = getattr(scheduler, "step_index", None)
        if step_index is None or step_index != self._step_index:
            self._num_taken += 1
        self._step_index = step_index
        return output

    def _begin_schedule(self, call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``scheduler.set_timesteps``, with which a schedule begins."""
        output = call(scheduler, *args, **kwargs)
        self._restart()
        self._begin()
        return output

    def note_call(self) -> int | None:
        """Note that the model is called now. Return the number of steps that the scheduler has taken; None if
        that is not the step of this call. To call it again before the same call of the model changes nothing.

        It is not if copies of the scheduler take the steps, or if it takes a step for each tile. The latter
        shows only after the step of the second tile, which is still numbered as one of the next timestep.
        """
        self._called = True
        if self._scheduler is None or self._with_copies or self._repeats:
            return None
        return self._num_taken

    def next_position(self, branch: str) -> SchedulePosition:
        """Return the step that the next call of the model for ``branch`` belongs to.

        Call it once per model call: if copies of the scheduler take the steps, it counts the calls, and
        begins a new section of the video.
        """
        if not self._times:
            self._times = self._read_times()
        index, times = self._num_taken, self._times
        if self._with_copies and index == 0:
            # Spread the steps of a section of the video evenly over the schedule. Their timesteps are
            # approximate, because in diffusion forcing each frame has its own.
            total = getattr(self._pipe, "_num_timesteps", None) or len(times)
            times = [times[i * len(times) // total] for i in range(total)]
            index = self._count_call(branch, len(times))
        total = max(len(times), 1)
        index = min(index, total - 1)
        if not times:
            return SchedulePosition(index, total, 0.0)
        return SchedulePosition(index, total, times[index])

    def _read_times(self) -> list[float]:
        """Return the timesteps of this schedule, without those that the call of the pipeline skips at its beginning."""
        listed = getattr(self._scheduler, "timesteps", None)
        if isinstance(listed, torch.Tensor):
            # One read of the device for all timesteps.
            listed = listed.tolist()
        times = []
        if listed is not None:
            times = [float(t) for t in listed]
        if original_class(self._scheduler).__name__ in _END_IS_LISTED:
            times = times[:-1]
        begin = getattr(self._scheduler, "begin_index", None)
        num_steps = getattr(self._pipe, "_num_timesteps", None)
        if begin is None and num_steps is not None and 0 < num_steps <= len(times):
            begin = len(times) - num_steps
        return times[begin or 0 :]

    def _restart(self) -> None:
        """Forget the steps that were taken, because a schedule begins."""
        self._num_taken, self._step_index, self._num_calls, self._section, self._times = 0, None, {}, 0, []
        self._last_time, self._last_address, self._called, self._repeats = None, None, False, False

    def _count_call(self, branch: str, total: int) -> int:
        """Count this model call of ``branch`` and return its step, assuming one call per step for each
        branch.

        ``total`` is the number of steps in the current section of the video; a new section begins when it
        changes, or when a branch has been called ``total`` times. A branch that was not called at some steps
        continues at most one step behind the branch with the most calls.
        """
        if total != self._section or self._num_calls.get(branch, 0) >= total:
            if self._section:
                self._begin()
            self._num_calls, self._section = {}, total
        latest = max(self._num_calls.values(), default=0)
        index = max(self._num_calls.get(branch, 0), latest - 1)
        self._num_calls[branch] = index + 1
        return index
