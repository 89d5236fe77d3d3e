"""Optional features of the cache: forecasts, observers of model calls, and the form of the cache in graphs.

A feature is a file of this folder that calls one of the functions below when it is imported. ``__init__``
imports it, in one line. Without that line, its options are refused, and a graph with a cache raises.

Readers: options.py (forecasts), and :class:`~para_core.cache.block_cache.BlockCache` (observers and the
traced form). Tests: tests/cache/test_options.py, and test_graph.py for the traced form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from para_core.cache.forecast_rule import Forecast

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache
    from para_core.cache.block_roles import BlockRole
    from para_core.cache.decision import DecisionInput, DecisionOutcome
    from para_core.cache.streams import Streams


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


@dataclass
class _Features:
    """The features that only one file may register; None without it."""

    orders: Orders | None = None
    # Makes the traced form of a cache.
    make_traced_form: Callable[[BlockCache], TracedForm] | None = None


_FEATURES = _Features()


def register_forecast(forecast: Forecast) -> None:
    """Make ``forecast`` a value of the option ``forecast``, by its name.

    Raises:
        ValueError: Another forecast has this name.
    """
    if forecast.name in FORECASTS:
        raise ValueError(f"two features register a forecast named {forecast.name!r}. Give one another name.")
    FORECASTS[forecast.name] = forecast


def register_orders(forecast_of: Callable[[int], Forecast], *, on_schedule: int) -> None:
    """Compute forecasts of an order above 0 by ``forecast_of(order)``.
    The arguments are those of :class:`Orders`.

    Raises:
        RuntimeError: A feature has registered orders before.
    """
    if _FEATURES.orders is not None:
        raise RuntimeError(
            "two features register forecasts of an order, and the cache uses one. Import one of them."
        )
    _FEATURES.orders = Orders(forecast_of, on_schedule)


def forecast_of_order(order: int) -> Forecast:
    """Return the forecast of ``order``, which is at least 1.

    Raises:
        ValueError: No feature has forecasts of an order above 0.
    """
    if _FEATURES.orders is None:
        raise ValueError(
            f"forecast_order is {order}, and this copy of para_core has no forecasts; expected 0, or leave it out."
        )
    return _FEATURES.orders.forecast_of(order)


def order_on_schedule() -> int:
    """Return the order of the forecast that a pipeline with a schedule uses by default."""
    if _FEATURES.orders is None:
        return 0
    return _FEATURES.orders.on_schedule


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
    """The part of a cache that runs while a graph is traced.

    Its methods are called in this order. If the model's blocks are compiled, the first and the last line are
    around them, in eager code; if the whole model is compiled, :meth:`enter` takes their place.

    ==========================================  =======================================================
    :meth:`begin_call`                          by ``BlockCache.run``, which a call of the model begins
    :meth:`enter`                               by ``apply_cache``, in a graph of the whole model
    :meth:`begin`, or in later steps            by block_run.py, after the first blocks
    :meth:`decide`
    :meth:`run_block`                           by block_run.py, once for each block that may be skipped
    :meth:`end_call`                            by ``BlockCache.run``, if a graph has decided
    ==========================================  =======================================================
    """

    def begin_call(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Prepare an eager call of the model, inside of which graphs may run, with these arguments."""

    def end_call(self, is_first: bool) -> None:
        """Finish an eager call whose step a graph decided.
        ``is_first`` is whether it began the branch's state.
        """

    def enter(self, arguments: Mapping[str, Any]) -> None:
        """Begin a call of the model that is being traced."""

    def begin(self, inputs: DecisionInput) -> Any:
        """Return the decider of a branch that begins with this call: the counterpart of a ``NumberDecider``."""

    def decide(self, inputs: DecisionInput) -> None:
        """Decide the step with tensors: set ``skip`` and ``outcome`` of the cache."""

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        entries: Streams,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of one block, which a tensor in the graph decides to run or to skip. ``entries``
        are the inputs of its group.
        """

    def reset(self) -> None:
        """Forget the current call, because the states of the cache were dropped."""

    def refresh(self) -> None:
        """Look up what may have changed in the model since the last generation."""


class NoTracedForm:
    """The traced form of a cache without the optional feature: eager calls need nothing, and a graph raises."""

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _fail(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "this copy of para_core has no cache inside compiled graphs. Remove the cache, or compile the blocks and "
            "not the model: model.compile_repeated_blocks()."
        )

    begin_call = end_call = reset = refresh = _do_nothing
    enter = begin = decide = run_block = _fail


def register_traced_form(make: Callable[[BlockCache], TracedForm]) -> None:
    """Run the cache inside graphs by ``make(cache)``.

    Raises:
        RuntimeError: A feature has registered a traced form before.
    """
    if _FEATURES.make_traced_form is not None:
        raise RuntimeError(
            "two features register a cache inside graphs, and a cache has one. Import one of them."
        )
    _FEATURES.make_traced_form = make


def traced_form(cache: BlockCache) -> TracedForm:
    """Return the part of ``cache`` that runs while a graph is traced.

    ``BlockCache.__init__`` calls this before it is done: ``make`` may read the module, ``blocks``,
    ``options``, ``threshold``, ``roles`` and ``step`` of the cache, and nothing else.
    """
    if _FEATURES.make_traced_form is None:
        return NoTracedForm()
    return _FEATURES.make_traced_form(cache)
