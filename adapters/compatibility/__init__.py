"""What is refused before a call: a pipeline, a transformer, or what stands on it. One table, :data:`REFUSALS`."""

from __future__ import annotations

from collections.abc import Iterator

from para_core.adapters.compatibility.check import REFUSALS, CompatibilityRule
from para_core.adapters.compatibility.context import CompatibilityContext, When, cases_of
from para_core.adapters.compatibility.seen import hooks_of

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
    """Raise if one of ``cases`` is refused."""
    for refusal, message in _refused(when, cases):
        raise refusal.error(message)


def reason_against(when: When, *cases: CompatibilityContext) -> str | None:
    """Why one of ``cases`` is refused; None if none is. For calls, of which all ranks have to know."""
    return next((message for _, message in _refused(when, cases)), None)


def _refused(when: When, cases: tuple[CompatibilityContext, ...]) -> Iterator[tuple[CompatibilityRule, str]]:
    for case in cases:
        for refusal in REFUSALS:
            found = when in refusal.when and refusal.test(case)
            if found is not None and found is not False:
                yield refusal, refusal.sentence.format(**case.words, **({} if found is True else found))
