"""Attention schedules: choose the attention of each denoising step of a pipeline.

``resolve.py`` makes the :class:`ScheduledAttention`, and ``call.py`` enters it around each generation. Which
steps are in the middle, and their options, is in ``para_core/attention/schedule.py``. Tests:
tests/adapters/test_attention_options.py, tests/adapters/test_schedule_of_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.callbacks import wrap_callbacks
from para_core.adapters.inspect.attention_names import check_native_attention
from para_core.adapters.inspect.scheduler_tracker import SchedulerTracker
from para_core.adapters.registry import adapter_for, require_blocks
from para_core.attention.attention_options import AttnOptions
from para_core.attention.schedule import AttentionSchedule
from para_core.cache.branches import Branches, conditions_of
from para_core.instance.modules import uncompiled
from para_core.instance.record import empty_slot, fill_during, slot_owner
from para_core.instance.slots import Slot
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import region_of


class ScheduledAttention:
    """The change of the attention options of one pipeline's transformers at each denoising step, by an
    AttentionSchedule.

    The step is read from the scheduler, so it is correct also with two calls per step for guidance, with
    steps that a cache skips, and with a second transformer. (Only if a pipeline copies its scheduler, calls
    are counted per branch.) Outside a generation and inside user callbacks attention is exact.

    Args:
        transformers: The transformers by component name, not compiled. The plan of each is applied, also on
            one rank (``on_one_rank`` of :func:`apply_plan`), because the options are those of its region.
        schedule: The schedule.
        options: The attention options, of which those of a step replace the backend.
        adapter: The adapter that the user passed; None without one.
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
        self._exact, self._middle = (schedule.options(options, middle=middle) for middle in (False, True))
        self._tracker = SchedulerTracker()
        self._parameters = {id(module): parameters_of(module) for module in transformers.values()}
        # Some pipelines step with copies of their scheduler, so the scheduler itself does not tell the
        # current step. For them the step is found by counting model calls per CFG branch, which these
        # conditioning arguments identify.
        adapters = [(module, adapter_for(module, adapter)) for module in transformers.values()]
        self._conditions = {
            id(module): conditions_of(module, require_blocks(module, adapter))
            for module, model in adapters
            if model is not None and model.steps_with_copies
        }
        # By id of the transformer, as are _parameters and _conditions; new in each generation.
        self._branches: dict[int, Branches] = {}
        # The transformers, compiled or not, whose calls a generation has wrapped.
        self._wrapped: WeakSet[nn.Module] = WeakSet()
        # Number of user callbacks that are running now (they may nest).
        self._in_callback = 0

    @contextmanager
    def generation(self, pipe: Any, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Set the backend at each step inside the ``with`` block, which runs one generation of ``pipe``.

        Yields ``kwargs`` with the user's callbacks wrapped; call the pipeline with these.
        """
        self._branches = {key: Branches(conditions) for key, conditions in self._conditions.items()}
        for name, module in self._transformers.items():
            check_native_attention(module, f"pipe.{name}")
        with ExitStack() as stack:
            for name in self._transformers:
                # Wrap a compiled component, not the module inside it: the change must not be traced. A
                # callback of another pipeline that shares the component may make this call, so restore the
                # slot of that pipeline.
                component = getattr(pipe, name)
                self._wrapped.add(component)
                stack.enter_context(
                    fill_during(
                        component, Slot.SCHEDULED_ATTENTION, {"__call__": self._run_model}, owner=self
                    )
                )
            stack.callback(self._use, self._exact)
            stack.enter_context(self._tracker.follow(pipe, lambda: None, with_copies=bool(self._conditions)))
            yield stack.enter_context(wrap_callbacks(kwargs, Slot.SCHEDULED_ATTENTION, self._run_callback))

    def remove(self) -> None:
        """Empty the slots of all components that this schedule has filled."""
        for component in self._wrapped:
            if slot_owner(component, Slot.SCHEDULED_ATTENTION, ScheduledAttention) is self:
                empty_slot(component, Slot.SCHEDULED_ATTENTION)

    def _run_model(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Set the options of the current step, then run a call of the transformer."""
        if not torch.compiler.is_compiling() and self._tracker.active and not self._in_callback:
            plain = uncompiled(module)
            branches = self._branches.get(id(plain))
            branch: str | None = ""
            if branches is not None:
                arguments = {**dict(zip(self._parameters[id(plain)], args, strict=False)), **kwargs}
                branch = branches.name_of(arguments)
            options = self._exact
            # The calls of an unknown branch cannot be counted, so they are exact.
            if branch is not None:
                step, num_steps, _ = self._tracker.next_position(branch)
                if self.schedule.is_middle(step, num_steps):
                    options = self._middle
            self._use(options)
        return call(module, *args, **kwargs)

    def _use(self, options: AttnOptions) -> None:
        """Set ``options`` on all transformers: only one of them runs at a time."""
        for module in self._transformers.values():
            region = region_of(module)
            if region is not None:
                region.use(options, region.cross_backend)

    def _run_callback(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``callback(*args, **kwargs)``, in which attention is exact."""
        # A callback may run another pipeline with the same transformers, which must use exact attention. The
        # next step of this pipeline sets its options again.
        self._use(self._exact)
        self._in_callback += 1
        try:
            return callback(*args, **kwargs)
        finally:
            self._in_callback -= 1
