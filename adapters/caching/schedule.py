"""Where in its schedule a pipeline is, as told by its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from para_core.cache.decision import Step
from para_core.cache.options import CacheOptions
from para_core.cache.report import Verdict
from para_core.instance import unwrap, wrap_method

_KEY = "cache"


class Schedule:
    """Follows a scheduler while a pipeline runs.

    Every call of ``scheduler.step`` is a step of the schedule, so schedulers that call the model twice per timestep (Heun)
    have twice as many. Where a schedule begins behind its first timestep (image to image), it says so: ``begin_index``.
    """

    def __init__(self) -> None:
        self.active = False
        self._scheduler: Any = None
        self._done = 0
        # Read once: on an accelerator, the host waits for them.
        self._times: list[float] = []

    @contextmanager
    def followed(self, scheduler: Any, begin: Callable[[], None]) -> Iterator[None]:
        """Inside, :meth:`step` is known.

        Args:
            begin: called where a schedule begins: some pipelines have one for each section of a film.
        """
        if self.active:
            raise RuntimeError(
                "this pipeline with a cache is already running, in another thread? Both would use the same cache. Use one "
                "thread, or a pipeline for each."
            )
        self._scheduler, self._done, self._times, self.active = scheduler, 0, [], True

        def count(scheduler: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = call(scheduler, *args, **kwargs)
            self._done += 1
            return output

        def restart(scheduler: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = call(scheduler, *args, **kwargs)
            self._done, self._times = 0, []
            begin()
            return output

        try:
            if scheduler is not None:
                wrap_method(scheduler, "step", _KEY, count)
                wrap_method(scheduler, "set_timesteps", _KEY, restart)
            yield
        finally:
            if scheduler is not None:
                unwrap(scheduler, _KEY)
            self.active, self._scheduler = False, None

    def step(self, options: CacheOptions) -> Step:
        """The step of the call that comes now."""
        if not self._times:
            times = getattr(self._scheduler, "timesteps", None)
            begin = getattr(self._scheduler, "begin_index", None) or 0
            self._times = [] if times is None else [float(t) for t in times.tolist()[begin:]]
        total = max(len(self._times), 1)
        index = min(self._done, total - 1)
        outside = not options.start <= index / total < options.end
        last = options.always_compute_last and index == total - 1
        return Step(
            index=index,
            total=total,
            time=self._times[index] if self._times else 0.0,
            must_compute=Verdict.SCHEDULE if outside or last else None,
        )
