"""Run the caches of one pipeline: find the CFG branch and the step of each transformer call.

``pipeline.py`` makes the :class:`PipelineCache` and fills the slot of the pipeline with it. Whether a step is
skipped is decided in ``para_core/cache/block_cache.py``. Tests: tests/cache/test_state.py,
tests/cache/test_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.callbacks import wrap_callbacks
from para_core.adapters.cache.checks import check_cached_call
from para_core.adapters.cache.threshold_warnings import warn_of_outcomes
from para_core.adapters.compatibility.checks import CheckedModel
from para_core.adapters.inspect.scheduler_tracker import SchedulerTracker
from para_core.adapters.registry import adapter_for, plan_for
from para_core.cache.block_cache import BlockCache
from para_core.instance.modules import uncompiled
from para_core.instance.record import empty_slot, fill_slot, is_filled, slot_owner
from para_core.instance.slots import Slot
from para_core.lazy_tensors import materialize
from para_core.plans.module_matching import parameters_of
from para_core.plans.samples import count_samples
from para_core.user_warnings import WarningLog


def caching_of(pipe: Any) -> PipelineCache | None:
    """Return the :class:`PipelineCache` of ``pipe``; None if it has no cache."""
    return slot_owner(pipe, Slot.CACHE, PipelineCache)


def cache_summary(pipe: Any) -> list[str]:
    """Return the lines in which optional features describe the last generation of ``pipe``, which has a cache."""
    caching = caching_of(pipe)
    if caching is None or not caching.caches:
        return []
    caches = list(caching.caches.values())
    return [line for observer in caches[0].observers for line in observer.summarize(caches).splitlines()]


class PipelineCache:
    """The caches of one pipeline, one per transformer by component name, and the state of its current generation."""

    def __init__(self) -> None:
        self.caches: dict[str, BlockCache] = {}
        # The adapter that the user passed to apply_cache_on_pipe; None if the library's adapters are used.
        self._adapter: Adapter | None = None
        self._with_copies = False
        # By transformer: the arguments that have a sample dim, and which dim it is. Used to count samples.
        self._batched: dict[str, Mapping[str, int | None]] = {}
        self._tracker = SchedulerTracker()
        # By transformer: the names of its positional parameters.
        self._parameters: dict[str, tuple[str, ...]] = {}
        # The name of this pipeline's filling of a transformer's slot; pipelines with other caches may share
        # the model.
        self._name = str(id(self))
        # The attributes below belong to the generation that is running.
        self._pipe: Any = None
        self._thread = 0
        # Number of user callbacks that are running now (they may nest). The cache is off inside them.
        self._in_callback = 0
        self._warnings = WarningLog()

    def replace(self, caches: dict[str, BlockCache], adapter: Adapter | None) -> None:
        """Use ``caches``, by component name, from the next generation on. If this fails, the previous caches
        stay.

        The hook of a model that gets a new cache is kept, so graphs that were compiled with it stay valid.
        ``adapter`` is the one that the user passed, or None.
        """
        before = self.caches
        adapters = [adapter_for(cache.module, adapter) for cache in caches.values()]
        plans = {name: plan_for(cache.module, adapter=adapter) for name, cache in caches.items()}
        with ExitStack() as rollback:
            for cache in caches.values():
                rollback.callback(cache.detach)
                cache.attach()
            for name, cache in before.items():
                if name not in caches or caches[name].module is not cache.module:
                    empty_slot(cache.module, Slot.CACHE, self._name)
                rollback.callback(cache.attach)
                cache.detach()
            rollback.pop_all()
        self.caches = caches
        self._adapter = adapter
        self._warnings.clear()
        self._with_copies = any(each is not None and each.steps_with_copies for each in adapters)
        self._batched = {name: plan.batched for name, plan in plans.items() if plan is not None}
        self._parameters = {name: parameters_of(cache.module) for name, cache in caches.items()}

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present caches, if :meth:`replace` has been called in between."""
        caches = self.caches
        adapter = self._adapter

        def restore() -> None:
            if self.caches is not caches:
                self.replace(caches, adapter)

        return restore

    def run(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one generation of ``pipe`` with the caches, around ``pipe.__call__``."""
        for name, cache in self.caches.items():
            check_cached_call(CheckedModel(pipe, cache.module, name), cache.options)
        with ExitStack() as stack:
            stack.enter_context(
                self._tracker.follow(pipe, self._begin_schedule, with_copies=self._with_copies)
            )
            stack.enter_context(self._generation(pipe))
            self._thread = get_ident()
            kwargs = stack.enter_context(wrap_callbacks(kwargs, Slot.CACHE, self._call_without_cache))
            return call(pipe, *args, **kwargs)

    def _call_without_cache(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``callback`` with the cache off, because it may run another pipeline that shares the models."""
        self._in_callback += 1
        try:
            return callback(*args, **kwargs)
        finally:
            self._in_callback -= 1

    @contextmanager
    def _generation(self, pipe: Any) -> Iterator[None]:
        """Run the ``with`` block as one generation of ``pipe``, and warn of its outcomes if it did not raise."""
        for name, cache in self.caches.items():
            cache.begin_generation()
            # Attach the cache's hooks again before the first CFG branch is identified: another pipeline that
            # shares the model and has other first_blocks may have replaced them since the last generation.
            cache.attach()
            # A compiled component has the slot, not the module inside it, so that the hook runs outside the
            # graph.
            component = getattr(pipe, name)
            if component is not cache.module:
                # It was compiled after an earlier generation. If a part of its graph falls back to eager code,
                # a hook inside it would run the cache a second time.
                empty_slot(cache.module, Slot.CACHE, self._name)
            if not is_filled(component, Slot.CACHE, self._name):
                run = partial(self._run_model, name)
                fill_slot(component, Slot.CACHE, {"__call__": run}, owner=self, name=self._name)
        self._pipe = pipe
        try:
            yield
            for component, cache in self.caches.items():
                owner = type(pipe).__name__
                if len(self.caches) > 1:
                    owner = f"{owner}'s {component}"
                warn_of_outcomes(owner, cache, self._warnings)
        finally:
            self._pipe = None
            for cache in self.caches.values():
                cache.reset()

    def _begin_schedule(self) -> None:
        """Empty all caches, because the pipeline begins another schedule."""
        for cache in self.caches.values():
            if self._with_copies:
                # The tracker finds the first call of a section while the cache runs that call, whose branch is
                # known by then. So keep the branches. The timestep, which jumps back, tells them of the section.
                cache.reset_states()
            else:
                cache.reset()

    def _run_model(
        self, name: str, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a call of the transformer ``name`` with its cache, or without it outside of the generation."""
        if torch.compiler.is_compiling() or not self._tracker.active:
            return call(module, *args, **kwargs)
        if self._in_callback or self._thread != get_ident():
            # Another pipeline that shares the model makes this call, so run the model without this cache.
            return call(module, *args, **kwargs)
        cache = self.caches[name]
        arguments = {**dict(zip(self._parameters[name], args, strict=False)), **kwargs}
        batched = self._batched.get(name, {})
        # A pipeline without this property may still use guidance, so assume two branches.
        guided = bool(batched) and getattr(self._pipe, "do_classifier_free_guidance", True)
        cache.num_branches = 1
        if guided:
            cache.num_branches = 2
        tokens, dim = next(iter(batched.items()), ("hidden_states", 0))
        cache.batch = count_samples(arguments.get(tokens), dim) or 0
        run = partial(call, module, *args, **kwargs)
        return cache.run(run, arguments, self._tracker.next_position, self._tracker.note_call())

    def announce(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the CFG branch of the next call of ``module``, which this rank or another one computes.

        Every rank calls this for every call, so that all ranks number the branches in the same order. Called
        by ``adapters/cfg/guided_calls.py``, whose ranks do not make every call. Collective, because ``args``
        and ``kwargs`` may have lazy tensors, which are fetched.
        """
        plain = uncompiled(module)
        # A callback may have removed the caches with their hooks. The rest of the generation then runs
        # without them.
        name = next((name for name, cache in self.caches.items() if cache.module is plain), None)
        if name is None or self._in_callback or not self._tracker.active or self._thread != get_ident():
            return
        cache = self.caches[name]
        arguments = {**dict(zip(self._parameters[name], args, strict=False)), **kwargs}
        cache.announce(materialize(arguments), self._tracker.note_call())

    def remove(self, pipe: Any) -> None:
        """Remove the caches and their hooks from the transformers of ``pipe``."""
        for name, cache in self.caches.items():
            component = getattr(pipe, name, None)
            for module in (component, uncompiled(component), cache.module):
                if isinstance(module, nn.Module):
                    empty_slot(module, Slot.CACHE, self._name)
            cache.detach()
