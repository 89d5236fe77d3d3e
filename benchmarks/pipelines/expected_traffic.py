"""What each rank of a pipeline sends on a mesh, foretold from one run of the unmodified pipeline on one device.

The formula, and what is seen of one call, are the planner's (`para_core/planner/traffic.py`, `observe.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from para_core.adapters.parallel.cfg_output import foreseen_output
from para_core.adapters.registry import plan_for, transformers_of
from para_core.planner import observe
from para_core.planner.traffic import ModelCall


@contextmanager
def observed(model: nn.Module, batch: int = 1) -> Iterator[list[ModelCall]]:
    """Inside, calls of ``model`` are listed; its samples are computed in ``batch`` shares if its plan would share them."""
    plan = plan_for(model)
    if plan is None:
        raise TypeError(f"there is no plan for {type(model).__name__}.")
    with observe.observed(model, plan, batch, is_foreseen=_is_foreseen) as calls:
        yield calls


def _is_foreseen(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return foreseen_output(model, args, kwargs) is not None


def takes_turns(pipe: Any) -> bool:
    """Whether ranks along ``batch`` take turns in the calls of a step; or they share the samples of each."""
    plan = plan_for(pipe.transformer)
    # Perturbed attention guidance takes a batch apart inside of the model.
    return plan is not None and (not plan.batched or hasattr(pipe, "pag_applied_layers"))


def observe_pipeline(pipe: Any, generate: Callable[[], Any], batch: int = 1) -> list[list[ModelCall]]:
    """The calls of each step of ``generate()``, which calls ``pipe``, as :func:`observed` lists them."""
    models = list(transformers_of(pipe).values())
    batch = 1 if takes_turns(pipe) else batch
    rounds: list[list[ModelCall]] = []
    # Of the class: LTX-2 makes a copy of its scheduler for sound.
    scheduler = type(pipe.scheduler)
    step = scheduler.step
    with ExitStack() as stack:
        seen = [stack.enter_context(observed(model, batch)) for model in models]

        def end_round() -> None:
            calls = [call for calls in seen for call in calls]
            if calls:
                rounds.append(calls)
            for each in seen:
                each.clear()

        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            end_round()
            return step(*args, **kwargs)

        stack.enter_context(mock.patch.object(scheduler, "step", functools.wraps(step)(step_and_end)))
        generate()
    return rounds
