"""Intercept the attention calls of a model with a plan, in a mode or at the dispatcher.

:mod:`.region` makes one :class:`Interception` for each call, and chooses which of the two it is. How a call
is computed is in :mod:`.planned_attention`, and how one is recognised in :mod:`para_core.modes.interceptor`.
Tests: tests/plans/test_exactness.py, tests/plans/test_attention_check.py, tests/modes/test_dispatcher.py,
tests/modes/test_handwritten.py, and those of PipeFusion, tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall
from para_core.modes.handwritten import HandwrittenAttention, may_be_scores
from para_core.modes.interceptor import at_the_dispatcher, call_original, intercept, not_at_the_dispatcher
from para_core.modes.registry import RECOMPUTATION
from para_core.plans.plan import Attention
from para_core.plans.planned_attention import PlannedAttention
from para_core.torch_internals import (
    all_saved_tensors_hooks,
    no_frame_of_its_own,
    set_grad_enabled,
    top_saved_tensors_hooks,
)


class PlannedAttnMode(TorchFunctionMode):
    """Mode that passes attention calls to a :class:`PlannedAttention`, also in compiled graphs and with
    gradients.

    ``by_hand`` records attention that the model computes by hand; None to look for none.
    """

    def __init__(self, planned: PlannedAttention, by_hand: HandwrittenAttention | None = None) -> None:
        super().__init__()
        self.planned = planned
        self.by_hand = by_hand

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Test is_compiling() first: every attribute that is read while tracing becomes a guard of the graph.
        # A reentrant checkpoint turns gradients off as it begins, and its recomputation must find the
        # attention of now. The other kind is found at an attention call: see modes/recomputation.py.
        if not torch.compiler.is_compiling() and func is set_grad_enabled and args == (False,):
            for recomputation in RECOMPUTATION:
                recomputation.gradients_disabled(partial(self.planned.bind, self.planned))
        if not self.planned.active[0]:
            return call_original(func, args, kwargs or {})
        planned = self.planned
        if torch.compiler.is_compiling() or self.by_hand is None:
            return intercept(self, planned, func, args, kwargs or {})
        by_hand = self.by_hand
        # Another mode of this plan may be around this one. It must not take our own attention for the
        # model's.
        with by_hand.pause():
            output = intercept(self, planned, func, args, kwargs or {})
        if may_be_scores(func):
            by_hand.note(func, args, kwargs or {}, output, planned.numbers_of_tokens())
        return output


class Interception:
    """The interception of attention calls by ``planned`` during one call of a model: by a
    :class:`PlannedAttnMode`, or by :func:`~para_core.modes.interceptor.at_the_dispatcher`, which adds no host
    time to other operators.

    Attributes:
        planned: The attention of modules that the plan does not describe.
        mode: The mode; None at the dispatcher.
        by_hand: Finds attention that the model computes by products itself; None if nobody looks for it, and
            not used in a graph.
        running: The attention of the modules that run now, nested in each other, the innermost last. The
            first is ``planned``; in a graph it is the only one.
        continues: Whether a key-value cache among the arguments already holds tokens, which precede the keys
            of the call.
    """

    def __init__(
        self, planned: PlannedAttention, *, at_dispatcher: bool, by_hand: HandwrittenAttention | None = None
    ) -> None:
        self.planned = planned
        self.by_hand = by_hand
        self.mode: PlannedAttnMode | None = None
        if not at_dispatcher:
            self.mode = PlannedAttnMode(planned, by_hand)
        self.running = [planned]
        self.continues = False
        if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
            # Hooks that were there before the call are no checkpoint of the model's own.
            planned.hooks_outside = len(all_saved_tensors_hooks())

    @property
    def current(self) -> PlannedAttention:
        """The attention of the innermost module that runs and that the plan describes; ``planned`` outside of these."""
        return self.running[-1]

    def intercept_calls(self) -> AbstractContextManager[Any]:
        """Return a context manager that intercepts attention calls."""
        if self.mode is not None:
            return self.mode
        return at_the_dispatcher(self._attend, lambda: self.running[-1].active[0])

    @contextmanager
    def switch_off(self) -> Iterator[None]:
        """Turn interception off inside the ``with`` block: each attention call runs on one device.

        Raises:
            RuntimeError: Inside of :meth:`attend_to`, whose attention has a flag ``active`` of its own, which
                this does not change.
        """
        if self.running[-1] is not self.planned:
            raise RuntimeError("interception cannot be switched off inside of attend_to().")
        active = self.planned.active
        before = active[0]
        active[0] = False
        dispatcher_off: AbstractContextManager[Any] = nullcontext()
        if self.mode is None:
            dispatcher_off = not_at_the_dispatcher()
        try:
            with dispatcher_off:
                yield
        finally:
            active[0] = before

    def _attend(self, call: SdpaCall) -> Tensor:
        # at_the_dispatcher asks is_active only for other operators than SDPA, so ask here.
        planned = self.running[-1]
        if not planned.active[0]:
            return call.on_one_device()
        return planned(call)

    @contextmanager
    def attend_to(self, calls: tuple[Attention, ...]) -> Iterator[PlannedAttention]:
        """Use ``calls[0]``, ``calls[1]``, … for the first, second, … attention call inside the ``with``
        block, and the last of them for further ones. Yield the attention function of these calls.

        For speed, :mod:`.submodule_calls` repeats what this does at the dispatcher: change both.
        """
        planned = self.planned.copy_for_calls(calls)
        if torch.compiler.is_compiling():
            # Enter a second mode instead of changing the list, because a branch of torch.cond must not change
            # outside state.
            with PlannedAttnMode(planned):
                yield planned
            return
        mode: AbstractContextManager[Any] = nullcontext()
        if self.mode is not None:
            mode = PlannedAttnMode(planned, self.by_hand)
        self.running.append(planned)
        try:
            with mode:
                yield planned
        finally:
            self.running.pop()
