"""The options of First Block Cache.

:mod:`.apply` and ``adapters/cache/pipeline.py`` make them of keyword arguments; the modules of this folder, the
checks in ``adapters/cache/checks.py`` and features of ``adapters/weights/`` read them.
Tests: tests/cache/test_options.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any

from para_core.cache.forecast_rule import REPEATED, Forecast
from para_core.cache.registry import FORECASTS, forecast_of_order, order_on_schedule
from para_core.cache.rules import Observation, Policy, Rule, check_rule_name, look_up, rule_of
from para_core.declared_options import Option, check_options, describe_options

# These options need the schedule of a pipeline, so apply_cache refuses them. An option that is added and
# needs it must be listed here.
_SCHEDULED = ("always_compute_last", "start", "end", "forecast_order", "forecast", "compute_steps")
# These options have no effect if compute_steps is set, so setting both is an error.
_VOID = ("warmup_steps", "max_consecutive_hits", "max_hits", "always_compute_last", "start", "end", "policy")


@describe_options
@dataclass(frozen=True)
class CacheOptions:
    """The options of First Block Cache.

    They are keyword arguments of :func:`~para_core.adapters.apply_cache_on_pipe` and :func:`apply_cache`.

    Args:
        {options}

    Raises:
        TypeError, ValueError: A value has a wrong type or is out of range, two options exclude each other, or
            this copy of para_core has no forecasts of that order.
    """

    residual_diff_threshold: Annotated[
        float,
        Option(
            10,
            "Skip a step if mean|r - r₀| / mean|r₀| is below this value, where r is the first-block "
            "residual of the step and r₀ that of the last computed step. Larger values are faster and "
            "deviate more from the original result; 0 computes every step.",
            default="of the model family",
            at_least=0.0,
        ),
    ]
    warmup_steps: Annotated[
        int,
        Option(
            20,
            "Number of steps at the start of each CFG branch that are computed. The first step is always computed.",
            at_least=0,
        ),
    ] = 0
    max_consecutive_hits: Annotated[
        int | None,
        Option(30, "Number of steps skipped in a row after which a step is computed.", at_least=0),
    ] = None
    max_hits: Annotated[
        int | None,
        Option(40, "Maximum number of skipped steps of each branch in a generation.", at_least=0),
    ] = None
    compute_steps: Annotated[
        Collection[int] | Sequence[bool] | None,
        Option(
            50,
            "The steps to compute, as indices in the schedule (-1 is the last step) or as one bool per "
            "step. Indices that a shorter schedule does not have are left out. All other steps are "
            "skipped, except the first step of a branch. The threshold and the rule then have no effect.",
            form="`Collection[int]` or `Sequence[bool]`",
            is_checked=False,
        ),
    ] = None
    always_compute_last: Annotated[bool, Option(60, "Whether to compute the last step of the schedule.")] = (
        False
    )
    start: Annotated[
        float,
        Option(
            70, "The fraction of the schedule after which steps may be skipped.", at_least=0.0, at_most=1.0
        ),
    ] = 0.0
    end: Annotated[
        float,
        Option(
            80, "The fraction of the schedule until which steps may be skipped.", at_least=0.0, at_most=1.0
        ),
    ] = 1.0
    first_blocks: Annotated[
        int,
        Option(
            90,
            "Number of blocks at the start of the stack that always run. The residual of all of them "
            "together is compared.",
            at_least=1,
        ),
    ] = 1
    last_blocks: Annotated[
        int,
        Option(100, "Number of blocks at the end of the stack that always run.", at_least=0),
    ] = 0
    forecast_order: Annotated[
        int | None,
        Option(
            110,
            "0 adds the residual of the last computed step, as plain First Block Cache does. 1 and 2 "
            "extrapolate the last two or three residuals by a polynomial in the timestep, as TaylorSeer "
            "(arXiv:2503.06923) does. Defaults to 1 for a pipeline with a schedule, otherwise to 0.",
            default="1 with a schedule, else 0",
            form="`0`, `1` or `2`",
            at_least=0,
            at_most=2,
        ),
    ] = None
    forecast: Annotated[
        str | Forecast | None,
        Option(
            120,
            'Another rule to forecast residuals, in place of `forecast_order`. `"foca"` extrapolates the '
            "last three residuals, as FoCa (arXiv:2508.16211) does.",
            form='`"foca"` or `Forecast`',
            is_checked=False,
        ),
    ] = None
    downsample: Annotated[int, Option(130, "Compare only every n-th channel.", at_least=1)] = 1
    rule: Annotated[
        str | Rule,
        Option(
            140,
            'How steps are compared. `"modulated_input"` compares the input of the first block, so a '
            "skipped step runs no block; for FLUX.1 only, and without a default threshold.",
            form='`"first_block"`, `"modulated_input"` or `Rule`',
            is_checked=False,
        ),
    ] = "first_block"
    policy: Annotated[
        Policy | None,
        Option(
            150,
            "A function that takes an `Observation` and returns whether to skip the step, in place of the "
            "threshold. It must return the same on all ranks that share a sequence, or they wait for each "
            "other. Ranks get equal observations, so use nothing but the observation: no clock, rank or "
            "random number. In a graph its numbers are 0-dim tensors.",
            expected="a function of an Observation",
        ),
    ] = None

    def __post_init__(self) -> None:
        rule = rule_of(self.rule)
        check_rule_name(rule)
        object.__setattr__(self, "rule", rule)
        check_options(self)
        if self.forecast is not None:
            chosen = look_up("forecast", self.forecast, Forecast, FORECASTS, ", or None: forecast_order=1")
            object.__setattr__(self, "forecast", chosen)
            if self.forecast_order is not None:
                raise ValueError(
                    f"forecast_order={self.forecast_order} and forecast={chosen.name} were given; leave one of "
                    "them out."
                )
        elif self.forecast_order:
            forecast_of_order(self.forecast_order)
        if self.compute_steps is not None:
            object.__setattr__(self, "compute_steps", self._require_steps())
        if self.start > self.end:
            raise ValueError(f"start={self.start} is after end={self.end}; expected start <= end.")

    def _require_steps(self) -> tuple[int | bool, ...]:
        """Return ``compute_steps`` as a tuple; raise if it is invalid, or if another option has no effect with it."""
        value: Any = self.compute_steps
        values = value
        if hasattr(value, "tolist"):
            values = value.tolist()
        steps: tuple[Any, ...] = ()
        if isinstance(values, Collection) and not isinstance(values, (str, bytes)):
            steps = tuple(values)
        if (
            not steps
            or not all(isinstance(step, int) for step in steps)
            or len({type(step) for step in steps}) > 1
        ):
            raise TypeError(
                f"compute_steps is {value!r}; expected indices of the steps to compute, or a bool for each step of "
                "the schedule."
            )
        void = self._find_changed(_VOID)
        if void:
            raise ValueError(
                f"compute_steps decides alone, so {void[0]} has no effect. Leave one of the two out."
            )
        return steps

    def computes(self, index: int, total: int) -> bool:
        """Whether ``compute_steps`` contains step ``index`` of ``total`` steps. Other indices have no effect.

        Raises:
            ValueError: ``compute_steps`` has bools, and not ``total`` of them, or no index of a step of the
                schedule.
        """
        steps: Any = self.compute_steps
        if isinstance(steps[0], bool):
            if len(steps) != total:
                raise ValueError(
                    f"compute_steps has {len(steps)} bools; this schedule has {total} steps. Give one for each."
                )
            return bool(steps[index])
        if not any(-total <= step < total for step in steps):
            raise ValueError(
                f"compute_steps names the steps {', '.join(map(str, steps))}; this schedule has steps 0 to "
                f"{total - 1}. Name at least one of them."
            )
        return index in steps or index - total in steps

    def ask_policy(self, observation: Observation) -> Any:
        """Call the policy, and return whether the step may be skipped: a bool, or a tensor with one element.

        Raises:
            TypeError: The policy returned something else.
        """
        skip: Any = None
        if self.policy is not None:
            skip = self.policy(observation)
        # Accept tensors and NumPy bools as well, both of which have a dtype.
        if not isinstance(skip, bool) and not hasattr(skip, "dtype"):
            raise TypeError(
                f"the policy returned {skip!r}; expected a bool, or a tensor of one element: True if the step may be "
                "skipped."
            )
        return skip

    def as_text(self, threshold: float | None = None) -> dict[str, str]:
        """Return all options as ``{name: text}``, which ranks can compare.

        ``threshold`` is the one to show, if it was changed after these options were chosen.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if threshold is not None:
            values["residual_diff_threshold"] = threshold
        policy = getattr(self.policy, "__qualname__", type(self.policy).__name__)
        names = {"policy": policy, "rule": self.rule_name, "forecast": self.chosen_forecast.name}
        return {name: str(value) for name, value in {**values, **names}.items()}

    @property
    def rule_name(self) -> str:
        return rule_of(self.rule).name

    @cached_property
    def chosen_forecast(self) -> Forecast:
        """The forecast that ``forecast`` or ``forecast_order`` selects."""
        if isinstance(self.forecast, Forecast):
            return self.forecast
        if not self.forecast_order:
            return REPEATED
        return forecast_of_order(self.forecast_order)

    @property
    def decides_before_blocks(self) -> bool:
        """Whether a step is decided before block 0, so that a skipped step runs no block."""
        return rule_of(self.rule).compares == "input"

    def on_schedule(self) -> CacheOptions:
        """Return these options for a pipeline with a schedule, in which ``forecast_order`` defaults to 1."""
        if self.forecast is None and self.forecast_order is None:
            return replace(self, forecast_order=order_on_schedule())
        return self

    @property
    def needs_schedule(self) -> tuple[str, ...]:
        """The names of options that are set and need the schedule of a pipeline."""
        changed = self._find_changed(_SCHEDULED)
        if self.chosen_forecast.num_residuals == 1:
            changed = [name for name in changed if name not in ("forecast_order", "forecast")]
        return tuple(changed)

    def _find_changed(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` whose options do not have their default."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def options_of(function: str, kwargs: Mapping[str, Any]) -> CacheOptions:
    """Convert the keyword arguments of ``function``, a name for error messages, to :class:`CacheOptions`.

    Raises:
        TypeError, ValueError: An option is unknown, the threshold is missing, or a value is invalid.
    """
    names = [field.name for field in fields(CacheOptions)]
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        raise TypeError(f"{function} has no option {unknown[0]!r}; its options are {', '.join(names)}.")
    if "residual_diff_threshold" not in kwargs:
        raise TypeError(f"{function} needs residual_diff_threshold=, for example 0.08 for FLUX.1-dev.")
    return CacheOptions(**kwargs)
