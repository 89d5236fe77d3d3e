"""Where in its schedule a pipeline is, as its scheduler shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from para_core.cache.decision import Step, Verdict
from para_core.cache.options import CacheOptions
from para_core.instance_patching import Order, original_class, unwrap, wrap_method

_KEY = "cache"
# Whose last timestep no pipeline of diffusers takes: it is where the schedule ends.
_END_IS_LISTED = ("LTXEulerAncestralRFScheduler",)


class Schedule:
    """Follows the scheduler of a pipeline while it runs.

    Every call of ``scheduler.step`` that moves the scheduler on is a step of the schedule, so schedulers that call the model
    twice per timestep (Heun) have twice as many. A pipeline may begin behind the first timestep (image to image, video to
    video), and may leave its scheduler alone and take steps with copies of it, one for each frame (diffusion forcing): then
    each branch counts its calls.
    """

    def __init__(self) -> None:
        self.active = False
        self._pipe: Any = None
        self._scheduler: Any = None
        # Steps that the scheduler took.
        self._done = 0
        # The scheduler's own count after the last of them, where it has one.
        self._taken: int | None = None
        self._copied = False
        # Calls by branch, for where copies of it do.
        self._calls: dict[str, int] = {}
        # Read once: on an accelerator, the host waits for them.
        self._times: list[float] = []

    @contextmanager
    def followed(self, pipe: Any, begin: Callable[[], None]) -> Iterator[None]:
        """Inside, :meth:`step` is known.

        Args:
            begin: called where a schedule begins: some pipelines have one for each section of a video.
        """
        if self.active:
            raise RuntimeError(
                "this pipeline with a cache is already running, in another thread? Both would use the same cache. Use one "
                "thread, or a pipeline for each."
            )
        scheduler = getattr(pipe, "scheduler", None)
        self._pipe, self._scheduler, self._copied, self.active = pipe, scheduler, False, True
        self._restart()

        def count(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            output = call(scheduler, *args, **kwargs)
            # Cosmos 1 asks for a step's clean sample first, turns the scheduler back, and takes the same step again.
            taken = getattr(scheduler, "step_index", None)
            if taken is None or taken != self._taken:
                self._done += 1
            self._taken = taken
            return output

        def restart(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            output = call(scheduler, *args, **kwargs)
            self._restart()
            begin()
            return output

        def copy(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._done == 0:
                self._copied = True
                self._restart()
                begin()
            return call(scheduler, *args, **kwargs)

        try:
            if scheduler is not None:
                wrap_method(scheduler, "step", _KEY, count, order=Order.CACHE, plain_copies=True)
                wrap_method(scheduler, "set_timesteps", _KEY, restart, order=Order.CACHE, plain_copies=True)
                # What copy.deepcopy asks for.
                wrap_method(scheduler, "__reduce_ex__", _KEY, copy, order=Order.CACHE, plain_copies=True)
            yield
        finally:
            if scheduler is not None:
                unwrap(scheduler, _KEY)
            self.active, self._scheduler, self._pipe = False, None, None

    def step(self, options: CacheOptions, branch: str) -> Step:
        """The step of the call of ``branch`` that comes now."""
        if not self._times:
            self._times = self._times_of_call()
        index, times = self._done, self._times
        if self._copied and self._done == 0:
            index, times = self._count_call(branch), self._times_of_copies()
        total = max(len(times), 1)
        index = min(index, total - 1)
        forced = Verdict.SCHEDULE if self._is_computed(index, total, options) else None
        if forced is None and options.compute_steps is not None:
            forced = Verdict.MASKED
        return Step(
            index=index,
            total=total,
            time=times[index] if times else 0.0,
            forced=forced,
        )

    def _is_computed(self, index: int, total: int, options: CacheOptions) -> bool:
        if options.compute_steps is not None:
            return options.computes(index, total)
        outside = not options.start <= index / total < options.end
        return outside or (options.always_compute_last and index == total - 1)

    def _restart(self) -> None:
        self._done, self._taken, self._calls, self._times = 0, None, {}, []

    def _times_of_call(self) -> list[float]:
        """The timesteps that this call of the pipeline takes."""
        listed = getattr(self._scheduler, "timesteps", None)
        times = [] if listed is None else [float(t) for t in listed.tolist()]
        if original_class(self._scheduler).__name__ in _END_IS_LISTED:
            times = times[:-1]
        begin = getattr(self._scheduler, "begin_index", None)
        taken = getattr(self._pipe, "_num_timesteps", None)
        if begin is None and taken is not None and 0 < taken <= len(times):
            begin = len(times) - taken
        return times[begin or 0 :]

    def _times_of_copies(self) -> list[float]:
        """As many as steps are taken, spread like the timesteps: each frame is at another one."""
        total = getattr(self._pipe, "_num_timesteps", None) or len(self._times)
        return [self._times[i * len(self._times) // total] for i in range(total)]

    def _count_call(self, branch: str) -> int:
        """The step, where each branch is called once per step; one that was left out for some steps comes back at the latest."""
        latest = max(self._calls.values(), default=0)
        index = max(self._calls.get(branch, 0), latest - 1)
        self._calls[branch] = index + 1
        return index
