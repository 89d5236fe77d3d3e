"""Optional features of the cache: forecasts, observers of model calls, and the form of the cache in graphs.

A feature is a file of this folder that calls one of the functions below when it is imported. ``__init__``
imports it, in one line. Without that line, its options are refused, and a graph with a cache raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from para_core.cache.forecast_rule import Forecast

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache
    from para_core.cache.block_roles import BlockRole
    from para_core.cache.decision import DecisionInput, DecisionOutcome


class Orders(NamedTuple):
    """The forecasts that the option ``forecast_order`` selects.

    Args:
        forecast_of: Returns the forecast of an order, which is at least 1.
        on_schedule: The order that a pipeline with a schedule uses by default.
    """

    forecast_of: Callable[[int], Forecast]
    on_schedule: int


# Forecasts that the option ``forecast`` selects by name.
FORECASTS: dict[str, Forecast] = {}
# Empty without the feature that has forecasts of an order; else its entry. The same holds for _TRACED_FORMS.
_ORDERS: list[Orders] = []


def register_forecast(forecast: Forecast) -> None:
    """Make ``forecast`` a value of the option ``forecast``, by its name."""
    FORECASTS[forecast.name] = forecast


def register_orders(forecast_of: Callable[[int], Forecast], *, on_schedule: int) -> None:
    """Compute forecasts of an order above 0 by ``forecast_of(order)``.
    The arguments are those of :class:`Orders`.
    """
    _ORDERS.append(Orders(forecast_of, on_schedule))


def forecast_of_order(order: int) -> Forecast:
    """Return the forecast of ``order``, which is at least 1.

    Raises:
        ValueError: No feature has forecasts of an order above 0.
    """
    for orders in _ORDERS:
        return orders.forecast_of(order)
    raise ValueError(
        f"forecast_order is {order}, and this copy of para_core has no forecasts; expected 0, or leave it out."
    )


def order_on_schedule() -> int:
    """Return the order of the forecast that a pipeline with a schedule uses by default."""
    return max([orders.on_schedule for orders in _ORDERS], default=0)


class CallObserver(Protocol):
    """An object that sees each call of one model with a cache. A call that raises has a begin and no end."""

    def begin(self, cache: BlockCache, branch: str, device: torch.device) -> None:
        """Note that a call of the CFG branch ``branch`` begins, on ``device``. ``cache.step`` is its step."""

    def end(self, outcome: DecisionOutcome) -> None:
        """Note that the call has ended, with this outcome of the decision."""

    def clear(self) -> None:
        """Forget all calls, because a generation begins."""

    def summarize(self, caches: Sequence[BlockCache]) -> str:
        """Return a text about the calls of the last generation of all ``caches`` of one pipeline."""


# Functions that return a new observer. A cache has one of each.
OBSERVERS: list[Callable[[], CallObserver]] = []


def register_observer(make: Callable[[], CallObserver]) -> None:
    """Let ``make()`` observe the calls of each model with a cache."""
    OBSERVERS.append(make)


class TracedForm(Protocol):
    """The part of a cache that runs while a graph is traced."""

    def begin_call(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Prepare an eager call of the model, inside of which graphs may run, with these arguments."""

    def end_call(self, is_first: bool) -> None:
        """Finish an eager call whose step a graph decided.
        ``is_first`` is whether it began the branch's state.
        """

    def enter(self, arguments: Mapping[str, Any]) -> None:
        """Begin a call of the model that is being traced."""

    def begin(self, inputs: DecisionInput) -> Any:
        """Return the decider of a branch that begins with this call."""

    def decide(self, inputs: DecisionInput) -> None:
        """Decide the step with tensors: set ``skip`` and ``outcome`` of the cache."""

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of one block, which a tensor in the graph decides to run or to skip."""

    def reset(self) -> None:
        """Forget the current call, because the states of the cache were dropped."""

    def refresh(self) -> None:
        """Look up what may have changed in the model since the last generation."""


class NoTracedForm:
    """The traced form of a cache without the optional feature: eager calls need nothing, and a graph raises."""

    def begin_call(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Do nothing."""

    def end_call(self, is_first: bool) -> None:
        """Do nothing."""

    def enter(self, arguments: Mapping[str, Any]) -> NoReturn:
        """Raise ``RuntimeError``."""
        self._fail()

    def begin(self, inputs: DecisionInput) -> NoReturn:
        """Raise ``RuntimeError``."""
        self._fail()

    def decide(self, inputs: DecisionInput) -> NoReturn:
        """Raise ``RuntimeError``."""
        self._fail()

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> NoReturn:
        """Raise ``RuntimeError``."""
        self._fail()

    def reset(self) -> None:
        """Do nothing."""

    def refresh(self) -> None:
        """Do nothing."""

    def _fail(self) -> NoReturn:
        raise RuntimeError(
            "this copy of para_core has no cache inside compiled graphs. Remove the cache, or compile the blocks and "
            "not the model: model.compile_repeated_blocks()."
        )


_TRACED_FORMS: list[Callable[[BlockCache], TracedForm]] = []


def register_traced_form(make: Callable[[BlockCache], TracedForm]) -> None:
    """Run the cache inside graphs by ``make(cache)``."""
    _TRACED_FORMS.append(make)


def traced_form(cache: BlockCache) -> TracedForm:
    """Return the part of ``cache`` that runs while a graph is traced."""
    for make in _TRACED_FORMS:
        return make(cache)
    return NoTracedForm()
