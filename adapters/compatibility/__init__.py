"""Refusal of pipelines, models and hooks that cannot run in parallel or be cached, by the table :data:`REFUSALS`."""

from __future__ import annotations

from collections.abc import Iterator

from para_core.adapters.compatibility.check import REFUSALS, CompatibilityRule
from para_core.adapters.compatibility.context import CompatibilityContext, When, cases_of
from para_core.adapters.compatibility.hooks import hooks_of

__all__ = [
    "REFUSALS",
    "CompatibilityContext",
    "CompatibilityRule",
    "When",
    "cases_of",
    "hooks_of",
    "reason_against",
    "refuse",
]


def refuse(when: When, *cases: CompatibilityContext) -> None:
    """Raise the error of the first rule that refuses one of ``cases``."""
    for rule, message in _refused(when, cases):
        raise rule.error(message)


def reason_against(when: When, *cases: CompatibilityContext) -> str | None:
    """Return the message of the first rule that refuses one of ``cases``; None if none does.

    Calls use it, because the reason must reach all ranks before one of them raises.
    """
    return next((message for _, message in _refused(when, cases)), None)


def _refused(when: When, cases: tuple[CompatibilityContext, ...]) -> Iterator[tuple[CompatibilityRule, str]]:
    for case in cases:
        for rule in REFUSALS:
            fields = when in rule.when and rule.test(case)
            if fields is not None and fields is not False:
                yield rule, rule.message.format(**case.fields, **({} if fields is True else fields))
