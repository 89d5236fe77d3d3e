"""The rules by which the cache compares steps, and what a policy of the user's sees of a step.

:mod:`.decision` applies a rule; how residuals are forecast is in :mod:`.forecast_rule`. Tests:
tests/cache/test_options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from para_core.cache.forecast_rule import Forecast
from para_core.cache.residual_operators import change

Number = float | Tensor


@dataclass(frozen=True)
class Rule:
    """A rule that measures how much a step differs from the last computed step.

    Each rank computes sums over its own tokens of the two steps, ``now`` and ``before``. Every rank adds the
    sums of all ranks in the order of the ranks, and computes the difference from the totals. So all ranks get
    the same bits, and decide alike.

    Both functions must be traceable by ``torch.compile``, because a compiled model decides in its graph: no
    ``.item()``, and no branch on a value.

    Args:
        name (`str`): The name of the rule in reports and messages. Ranks compare their options by it, so give
            rules of your own different names, and none that is in ``RULES``.
        sums (`Callable`): ``sums(now, before)`` takes the flattened values of this rank, ``[B, n]``, and
            returns k sums for each sample, ``[B, k]`` in float32. They must be additive over tokens: the sums
            of all tokens are those of the ranks, added up. A mean or a norm is not. n may differ between
            ranks, and may be 0.
        difference (`Callable`): ``difference(totals)`` takes the sums over all ranks, ``[B, k]``, and returns
            the difference of each sample, ``[B]``. If one is not finite, the step is computed.
        source (`str`): The publication of the rule.
        compares (`"residual"` or `"input"`, defaults to `"residual"`): Whether the first-block residual is
            compared, or the modulated input of the first block (``CachedBlocks.modulated``). The input is
            known before any block runs, so a skipped step runs no block at all.

    Raises:
        TypeError, ValueError: ``sums`` or ``difference`` is not callable, or ``compares`` is another word.
    """

    name: str
    sums: Callable[[Tensor, Tensor], Tensor]
    difference: Callable[[Tensor], Tensor]
    source: str
    compares: Literal["residual", "input"] = "residual"

    def __post_init__(self) -> None:
        for name in ("sums", "difference"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected a function of tensors.")
        if self.compares not in ("residual", "input"):
            raise ValueError(f"compares is {self.compares!r}; expected 'residual' or 'input'.")


def _ratio(sums: Tensor) -> Tensor:
    """Return the quotient ``[B]`` of two sums ``[B, 2]``. It is not finite if the second is 0: the step is computed."""
    return sums[:, 0] / sums[:, 1]


# The difference is mean|now - before| / mean|before| of the first-block residual.
FIRST_BLOCK = Rule(
    "first_block",
    change,
    _ratio,
    source="ParaAttention, First Block Cache (github.com/chengzeyi/ParaAttention)",
)

# The difference is mean|now - before| / mean|before| of the input of block 0 after its normalization and
# modulation.
MODULATED_INPUT = Rule(
    "modulated_input",
    change,
    _ratio,
    source="what TeaCache (arXiv:2411.19108) compares; here with the last computed step, not added up from step to "
    "step",
    compares="input",
)

RULES = {rule.name: rule for rule in (FIRST_BLOCK, MODULATED_INPUT)}


NamedChoice = TypeVar("NamedChoice", Rule, Forecast)


def look_up(
    option: str, value: Any, kind: type[NamedChoice], by_name: Mapping[str, NamedChoice], otherwise: str = ""
) -> NamedChoice:
    """Return ``value`` if it is a ``kind``, else the one with this name in ``by_name``.

    Args:
        option: The name of the option whose value this is, for messages.
        value: A ``kind``, or the name of one.
        kind: The class, :class:`Rule` or :class:`Forecast`.
        by_name: The instances that have a name which users may write.
        otherwise: What else the option accepts, which ends the messages, such as ``", or None"``.

    Raises:
        TypeError, ValueError: ``value`` is neither a string nor a ``kind``, or it is an unknown name.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{option} is {value!r}; expected a name, or a {kind.__name__} of para_core{otherwise}."
        )
    if value not in by_name:
        names = ", ".join(map(repr, by_name))
        raise ValueError(f"{option} is {value!r}; expected one of {names}, or a {kind.__name__}{otherwise}.")
    return by_name[value]


def rule_of(rule: str | Rule) -> Rule:
    """Return the rule with the name ``rule``, or ``rule`` itself.
    Raise ``TypeError`` or ``ValueError`` for others.
    """
    return look_up("rule", rule, Rule, RULES)


def check_rule_name(rule: Rule) -> None:
    """Raise ``ValueError`` if ``rule`` has the name of another rule in ``RULES``: ranks would take them for equal."""
    if RULES.get(rule.name, rule) != rule:
        raise ValueError(
            f"a rule of your own has the name {rule.name!r}; expected a name other than {', '.join(map(repr, RULES))}."
        )


@dataclass(frozen=True)
class Observation:
    """The inputs of a policy: numbers in eager code, 0-dim tensors in a compiled graph.

    Args:
        difference: How much the step differs from the last computed step, measured by the rule: the largest
            difference of all samples and branches in the batch.
        threshold: The option ``residual_diff_threshold``.
        step: Index of the step in the schedule, from 0.
        num_steps: Number of steps in the schedule.
        hits_in_a_row: Number of skipped steps since the last computed step.
    """

    difference: Number
    threshold: Number
    step: Number
    num_steps: Number
    hits_in_a_row: Number


# A policy is a user's function that returns whether a step may be skipped. It must return the same on all ranks
# that share a sequence, which get equal observations; otherwise they wait for each other.
Policy = Callable[[Observation], bool | Tensor]
