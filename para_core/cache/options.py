"""What a user can set of a cache: its options, and the rule that compares steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from para_core.cache.forecasts import Forecast, forecast_of, taylor
from para_core.cache.operators import change

Number = float | Tensor


@dataclass(frozen=True)
class Rule:
    """How much a step differs from an earlier one, judged by what its first block does.

    What is compared, ``now`` and ``before``, are the first-block residuals ``[B, S, C]`` of this rank's tokens; the rule
    gives sums over them, which the ranks add up, and a number made of these.

    Args:
        name: in reports and messages.
        sums: of two tensors ``[B, n]``, this rank's values of each sample, ``[B, k]`` sums in float32.
        difference: of these, summed over the ranks, ``[B]`` differences.
        source: who published it.
        compares: ``"residual"``: of the first block; ``"input"``: what ``CachedBlocks.modulated`` says before it, so that a
            skipped step runs no block at all.
    """

    name: str
    sums: Callable[[Tensor, Tensor], Tensor]
    difference: Callable[[Tensor], Tensor]
    source: str
    compares: Literal["residual", "input"] = "residual"


def _ratio(sums: Tensor) -> Tensor:
    return sums[:, 0] / sums[:, 1]


# mean|now - last computed| / mean|last computed|.
FIRST_BLOCK = Rule(
    "first_block",
    change,
    _ratio,
    source="ParaAttention, First Block Cache (github.com/chengzeyi/ParaAttention)",
)

# The same of the modulated input of block 0, before any block.
MODULATED_INPUT = Rule(
    "modulated_input",
    change,
    _ratio,
    source="what TeaCache (arXiv:2411.19108) compares; here with the last computed step, not added up from step to step",
    compares="input",
)

RULES = {rule.name: rule for rule in (FIRST_BLOCK, MODULATED_INPUT)}


def rule_of(rule: str | Rule) -> Rule:
    """A rule by its name, or itself.

    Raises:
        ValueError, TypeError: there is no such rule.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rule is {rule!r}; expected a name, or a Rule of para_core.")
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {', '.join(map(repr, RULES))}, or a Rule.")
    return RULES[rule]


@dataclass(frozen=True)
class Observation:
    """What is known when a step is decided. Numbers in eager code, 0-dim tensors in a compiled graph.

    Args:
        difference: by the rule; the largest of the samples, of all branches that the call holds.
        threshold: ``residual_diff_threshold``.
        step: index of the step in the schedule, from 0.
        num_steps: of the schedule.
        hits_in_a_row: since the last computed step.
    """

    difference: Number
    threshold: Number
    step: Number
    num_steps: Number
    hits_in_a_row: Number


# Whether the step may be skipped.
Policy = Callable[[Observation], "bool | Tensor"]


# Options that follow a schedule.
SCHEDULED = ("always_compute_last", "start", "end", "forecast_order", "forecast", "compute_steps")
# Options that compute_steps makes void.
_VOID = ("warmup_steps", "max_consecutive_hits", "max_hits", "always_compute_last", "start", "end", "policy")


@dataclass(frozen=True)
class CacheOptions:
    """What a user can set of a cache; each is a keyword argument of what applies one.

    Args:
        residual_diff_threshold: skip where mean|change| / mean|last| of the first-block residual is below it. Larger is faster
            and less like the original; 0 computes all.
        warmup_steps: so many first steps of each branch are computed; the first one always is.
        max_consecutive_hits: after so many skipped steps one is computed.
        max_hits: of each branch at most so many steps of a generation are skipped.
        compute_steps: which steps are computed, in place of all rules: indices of the schedule's steps (-1: the last), or a
            bool for each. All others are skipped, but for the first of a branch.
        always_compute_last: compute the last step of the schedule.
        start, end: skip only between these fractions of the schedule's steps.
        first_blocks: so many first blocks always run, and the residual is that of all of them together.
        last_blocks: so many last blocks always run.
        forecast_order: 0 adds the residual of the last computed step, which is plain First Block Cache; 1 and 2 extrapolate
            in the schedule's time through the last two or three. Left out: 1 where a pipeline has a schedule, else 0.
        forecast: in place of ``forecast_order``: ``"foca"``, through the last three, or a ``Forecast`` of your own.
        downsample: compare every n-th channel only.
        rule: ``"first_block"``; ``"modulated_input"``, which runs no block at a skipped step; or a ``Rule`` of your own.
        policy: decides instead of the threshold: called with an ``Observation``, returns whether to skip. In a compiled
            graph its numbers are 0-dim tensors.
    """

    residual_diff_threshold: float
    warmup_steps: int = 0
    max_consecutive_hits: int | None = None
    max_hits: int | None = None
    compute_steps: Collection[int] | Sequence[bool] | None = None
    always_compute_last: bool = False
    start: float = 0.0
    end: float = 1.0
    first_blocks: int = 1
    last_blocks: int = 0
    forecast_order: int | None = None
    forecast: str | Forecast | None = None
    downsample: int = 1
    rule: str | Rule = "first_block"
    policy: Policy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", rule_of(self.rule))
        _require_number("residual_diff_threshold", self.residual_diff_threshold, at_least=0.0)
        _require_int("warmup_steps", self.warmup_steps, at_least=0)
        for name in ("max_consecutive_hits", "max_hits"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), at_least=0)
        _require_int("first_blocks", self.first_blocks, at_least=1)
        _require_int("last_blocks", self.last_blocks, at_least=0)
        self._require_forecast()
        if self.compute_steps is not None:
            object.__setattr__(self, "compute_steps", self._require_steps())
        _require_int("downsample", self.downsample, at_least=1)
        if not isinstance(self.always_compute_last, bool):
            raise TypeError(f"always_compute_last is {self.always_compute_last!r}; expected True or False.")
        _require_number("start", self.start, at_least=0.0, at_most=1.0)
        _require_number("end", self.end, at_least=0.0, at_most=1.0)
        if self.start > self.end:
            raise ValueError(f"start={self.start} is behind end={self.end}; expected start <= end.")
        if self.policy is not None and not callable(self.policy):
            raise TypeError(f"policy is {self.policy!r}; expected a function of an Observation, or None.")

    def _require_forecast(self) -> None:
        if self.forecast_order is not None:
            _require_int("forecast_order", self.forecast_order, at_least=0, at_most=2)
        if self.forecast is None:
            return
        object.__setattr__(self, "forecast", forecast_of(self.forecast))
        if self.forecast_order is not None:
            raise ValueError(
                f"forecast_order={self.forecast_order} and forecast={self.forecasts.name} were given; leave one of them out."
            )

    def _require_steps(self) -> tuple[int | bool, ...]:
        given: Any = self.compute_steps
        listed = given.tolist() if hasattr(given, "tolist") else given
        steps = tuple(listed) if isinstance(listed, Collection) and not isinstance(listed, (str, bytes)) else ()
        if not steps or not all(isinstance(step, int) for step in steps) or len({type(step) for step in steps}) > 1:
            raise TypeError(
                f"compute_steps is {given!r}; expected indices of the steps to compute, or a bool for each step of the schedule."
            )
        void = self._changed(_VOID)
        if void:
            raise ValueError(f"compute_steps decides alone, so {void[0]} would have no effect. Leave one of them out.")
        return steps

    def computes(self, index: int, total: int) -> bool:
        """Whether ``compute_steps`` names the step ``index`` of ``total``.

        Raises:
            ValueError: it does not fit a schedule of ``total`` steps.
        """
        steps: Any = self.compute_steps
        if isinstance(steps[0], bool):
            if len(steps) != total:
                raise ValueError(
                    f"compute_steps has {len(steps)} bools; this schedule has {total} steps. Give one for each."
                )
            return bool(steps[index])
        outside = [step for step in steps if not -total <= step < total]
        if outside:
            raise ValueError(f"compute_steps names step {outside[0]}; this schedule has steps 0 to {total - 1}.")
        return index in steps or index - total in steps

    def ask_policy(self, seen: Observation) -> Any:
        """What the policy says: a bool, or a tensor of one element.

        Raises:
            TypeError: it says something else.
        """
        found: Any = None if self.policy is None else self.policy(seen)
        # NumPy's bool has a dtype, too.
        if not isinstance(found, bool) and not hasattr(found, "dtype"):
            raise TypeError(
                f"the policy returned {found!r}; expected True where the step may be skipped, else False: a bool, or a tensor of "
                "one element."
            )
        return found

    def as_text(self) -> dict[str, str]:
        """By name, for comparing ranks."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        policy = getattr(self.policy, "__qualname__", type(self.policy).__name__)
        names = {"rule": rule_of(self.rule).name, "policy": policy, "forecast": self.forecasts.name}
        return {name: str(value) for name, value in {**values, **names}.items()}

    @property
    def forecasts(self) -> Forecast:
        """By ``forecast``, or ``forecast_order``."""
        return taylor(self.forecast_order or 0) if self.forecast is None else forecast_of(self.forecast)

    @property
    def decides_before_blocks(self) -> bool:
        """Whether no block runs at a skipped step."""
        return rule_of(self.rule).compares == "input"

    @property
    def num_residuals(self) -> int:
        """So many are stored of each stream."""
        return self.forecasts.num_residuals

    def on_schedule(self) -> CacheOptions:
        """With the defaults of a pipeline that has a schedule."""
        unset = self.forecast is None and self.forecast_order is None
        return replace(self, forecast_order=1) if unset else self

    @property
    def needs_schedule(self) -> tuple[str, ...]:
        """Names of the options that were set and cannot be followed without a scheduler."""
        changed = self._changed(SCHEDULED)
        if self.num_residuals == 1:
            changed = [name for name in changed if name not in ("forecast_order", "forecast")]
        return tuple(changed)

    def _changed(self, names: Sequence[str]) -> list[str]:
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


Function = TypeVar("Function", bound=Callable[..., Any])


def shows_options(**defaults: Any) -> Callable[[Function], Function]:
    """Show each option in the signature of a function that takes them as ``**options``.

    Args:
        defaults: where they are not those of :class:`CacheOptions`.
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [known for known in signature.parameters.values() if known.kind is not known.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(
                    field.name, inspect.Parameter.empty if field.default is MISSING else field.default
                ),
                annotation=field.type,
            )
            for field in fields(CacheOptions)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return show


def options_of(function: str, given: Mapping[str, Any]) -> CacheOptions:
    """The options that ``function`` was given.

    Raises:
        TypeError, ValueError: there is no such option, the threshold is missing, or a value does not fit.
    """
    names = [field.name for field in fields(CacheOptions)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TypeError(f"{function} has no option {unknown[0]!r}; its options are {', '.join(names)}.")
    if "residual_diff_threshold" not in given:
        raise TypeError(f"{function} needs residual_diff_threshold=; 0.08 is one for FLUX.1-dev.")
    return CacheOptions(**given)


def _require_int(name: str, value: Any, at_least: int, at_most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an integer.")
    _require_range(name, value, at_least, at_most)


def _require_number(name: str, value: Any, at_least: float, at_most: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise TypeError(f"{name} is {value!r}; expected a number.")
    _require_range(name, value, at_least, at_most)


def _require_range(name: str, value: float, at_least: float, at_most: float | None) -> None:
    if value < at_least or (at_most is not None and value > at_most):
        upper = "" if at_most is None else f" and at most {at_most}"
        raise ValueError(f"{name} is {value}; expected at least {at_least}{upper}.")
