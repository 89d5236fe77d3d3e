"""Refusal of pipelines, models and hooks that cannot run in parallel or be cached, by the table :data:`REFUSALS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from para_core.adapters.compatibility.check import REFUSALS, CompatibilityRule
from para_core.adapters.compatibility.context import CompatibilityContext, When, cases_of
from para_core.adapters.compatibility.hooks import hooks_of
from para_core.adapters.consistency.arguments import require_same_inputs
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class

__all__ = [
    "REFUSALS",
    "CompatibilityContext",
    "CompatibilityRule",
    "When",
    "cases_of",
    "hooks_of",
    "reason_against",
    "refuse",
    "require_same_call_of_model",
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


def require_same_call_of_model(module: Any, inputs: Mapping[str, Any], mesh: GuidedMesh, *, assume_equal: bool) -> None:
    """Raise on every rank if a call of ``module`` is refused on one rank, or its ``inputs`` differ between ranks.

    Args:
        assume_equal: Whether to skip the comparison. Then only the rank whose call is refused raises.
    """
    mesh.check_alive()
    problem = reason_against(When.PARALLEL_CALL, CompatibilityContext(module, module, mesh=mesh))
    if not assume_equal:
        require_same_inputs(inputs, mesh, f"this {original_class(module).__name__}", problem)
    elif problem is not None:
        raise RuntimeError(problem)


def _refused(when: When, cases: tuple[CompatibilityContext, ...]) -> Iterator[tuple[CompatibilityRule, str]]:
    for case in cases:
        for rule in REFUSALS:
            fields = when in rule.when and rule.test(case)
            if fields is not None and fields is not False:
                yield rule, rule.message.format(**case.fields, **({} if fields is True else fields))
