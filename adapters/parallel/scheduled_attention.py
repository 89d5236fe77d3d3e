"""Attention of a pipeline's transformers by a schedule: the backend of each step of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.attention_names import require_native_attention
from para_core.adapters.consistency.callbacks import around_callbacks
from para_core.adapters.registry import adapter_for, require_blocks
from para_core.adapters.scheduler_tracker import SchedulerTracker
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_schedule import AttentionSchedule
from para_core.attention.backend_selection import Backend
from para_core.cache.branches import Branches, conditions_of
from para_core.instance_patching import WrapperPriority, uncompiled, unwrap, wrap_method, wrapper
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import region_of

_KEY = "scheduled attention"


class ScheduledAttention:
    """The transformers of one pipeline, whose attention follows a schedule.

    The scheduler tells the step, so guidance by two calls, steps that a cache skips and a second transformer change
    nothing. Outside a generation, and in callbacks, attention is that of the first step: exact.

    Args:
        options: Attention options of the transformers, with any backend.
    """

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        schedule: AttentionSchedule,
        options: AttnOptions,
        adapter: Adapter | None,
    ) -> None:
        self.schedule = schedule
        self._transformers = transformers
        self._options = {backend: replace(options, backend=backend) for backend in schedule.backends}
        self._tracker = SchedulerTracker()
        self._parameters = {id(module): parameters_of(module) for module in transformers.values()}
        # Only pipelines that take their steps with copies of the scheduler need the branches, to count their calls.
        adapters = [(module, adapter_for(module, adapter)) for module in transformers.values()]
        self._conditions = {
            id(module): conditions_of(module, require_blocks(module, adapter))
            for module, model in adapters
            if model is not None and model.steps_with_copies
        }
        self._branches: dict[int, Branches] = {}
        # Number of user callbacks that are running.
        self._in_callback = 0

    @contextmanager
    def generation(self, pipe: Any, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Choose the backends in one generation of ``pipe``.

        Yields:
            The arguments to call the pipeline with.
        """
        self._branches = {key: Branches(conditions) for key, conditions in self._conditions.items()}
        for name, module in self._transformers.items():
            require_native_attention(module, f"pipe.{name}")
            component = getattr(pipe, name)
            if wrapper(component, "__call__", _KEY) != self._around_model:
                # The component may be the wrapper of torch.compile, because nothing here belongs into a graph.
                wrap_method(component, "__call__", _KEY, self._around_model, order=WrapperPriority.CACHE)
        with ExitStack() as stack:
            stack.callback(self._use, self.schedule.exact)
            stack.enter_context(self._tracker.following(pipe, lambda: None, with_copies=bool(self._conditions)))
            yield stack.enter_context(around_callbacks(kwargs, _KEY, self._run_callback, order=WrapperPriority.CACHE))

    def remove(self, pipe: Any) -> None:
        """Remove the wrappers of the transformers of ``pipe``."""
        for name, module in self._transformers.items():
            component = getattr(pipe, name, None)
            for instance in (component, uncompiled(component), module):
                if isinstance(instance, nn.Module):
                    unwrap(instance, _KEY)

    def _around_model(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self._tracker.active and not self._in_callback:
            step, num_steps, _ = self._tracker.position(self._branch(uncompiled(module), args, kwargs))
            self._use(self.schedule.backend_at(step, num_steps))
        return call(module, *args, **kwargs)

    def _branch(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        branches = self._branches.get(id(module))
        if branches is None:
            return ""
        return branches.name_of({**dict(zip(self._parameters[id(module)], args, strict=False)), **kwargs}) or ""

    def _use(self, backend: Backend | None) -> None:
        for module in self._transformers.values():
            region = region_of(module)
            if region is not None:
                region.use(self._options[backend], region.cross_backend)

    def _run_callback(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A callback may run another pipeline that shares the transformers. The next step sets the backend again.
        self._use(self.schedule.exact)
        self._in_callback += 1
        try:
            return callback(*args, **kwargs)
        finally:
            self._in_callback -= 1
