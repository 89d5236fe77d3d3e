"""Search an exact plan for a region of a model: try each candidate, then variants of those that are not
exact.

``propose.py`` calls it for each region. Candidates are made in ``candidates.py``, variants in ``text.py`` and
``gathered_modules.py``, and ``plan_check.py`` checks them. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from para_core.adapters.propose.candidates import make_candidates
from para_core.adapters.propose.gathered_modules import computes_much, with_gathered_module
from para_core.adapters.propose.overrides import Answers, split_name, with_answers
from para_core.adapters.propose.plan_check import InexactPlanError, PlanCheck
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.region import TEXT, ObservedRegion
from para_core.adapters.propose.text import variants_with_sharded_text
from para_core.plans.plan import Plan, ShardRule

# Limits that keep a search short, because each trial runs the model several times: the number of inexact
# candidates of a start that are tried again with modules that are given all tokens, and the number of such
# modules in one plan.
_MOST_PLANS_TO_GATHER_IN, _MOST_GATHERED_MODULES = 4, 3


@dataclass(frozen=True)
class Failure:
    """A plan that was not exact.

    Args:
        plan: The plan.
        reason: Why it is not exact, as a sentence.
        region: The part of the model for which it was guessed; None for a plan in answers.
        way_out: A plan that is exact, but in which modules that compute much get all tokens on every rank. It
            is shown to the user, and not proposed.
    """

    plan: Plan
    reason: str
    region: ObservedRegion | None = None
    way_out: Plan | None = None


class Failures:
    """The plans that were not exact, in the order in which they were tried."""

    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Add ``failure``, or replace that of the same plan."""
        self._failures[repr(failure.plan)] = failure

    def __contains__(self, plan: Plan) -> bool:
        return repr(plan) in self._failures

    def __getitem__(self, plan: Plan) -> Failure:
        return self._failures[repr(plan)]

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._failures.values())


@dataclass(frozen=True)
class Search:
    """The search of an exact plan.

    Args:
        name: Name of the model's class.
        check: Checks plans.
        answers: Parts of a plan that replace guesses.
        failures: The plans that were not exact. They are not tried again.
        errors: Those that ``with_answers`` raised for candidates that the answers do not fit.
    """

    name: str
    check: PlanCheck
    answers: Answers
    failures: Failures = field(default_factory=Failures)
    errors: list[ValueError] = field(default_factory=list)

    def find_plan(self, region: ObservedRegion) -> Proposal | None:
        """Return the first exact plan for ``region``; None if there is none."""
        inexact: list[Proposal] = []
        for candidate in make_candidates(region):
            try:
                plan = with_answers(candidate.plan, self.answers, self.check.module)
            except ValueError as error:
                # The answers may fit another candidate, which may be exact.
                self.errors.append(error)
                continue
            if plan in self.failures:
                continue
            # A plan needs an error, and is not checked yet. Of an inexact one this 0 is replaced or dropped.
            proposal = Proposal(self.name, plan, error=0.0, reasons=self._with_answers(candidate.reasons))
            try:
                proposal = replace(proposal, error=self.check.measure_error(plan, region.start.entries))
            except InexactPlanError as error:
                self.failures.add(Failure(plan, f"{region.start.block}: {error}", region))
                inexact.append(proposal)
            else:
                return self._with_text(proposal, plan, region) or proposal
        if not inexact:
            return None
        return self._find_variant(inexact, region)

    def _find_variant(self, inexact: list[Proposal], region: ObservedRegion) -> Proposal | None:
        """Return an exact variant of one of the plans that are not; None if there is none."""
        likeliest = inexact[0]
        if likeliest.plan is not None:
            # If a tensor holds entries of text and image, only a plan that shards text at the model's inputs
            # is exact.
            sharded = self._with_text(likeliest, likeliest.plan, region)
            if sharded is not None:
                return sharded
        for proposal in inexact[:_MOST_PLANS_TO_GATHER_IN]:
            whole = self._with_gathered_modules(proposal, region)
            if whole is None or proposal.plan is None:
                continue
            if not whole.computes_much:
                return whole.proposal
            # Only one way out is shown, so the other candidates need no search.
            failure = self.failures[proposal.plan]
            self.failures.add(replace(failure, way_out=whole.proposal.plan))
            return None
        return None

    def _with_answers(self, reasons: tuple[str, ...]) -> tuple[str, ...]:
        """Return the reasons of guesses that no answer replaces, and of the answers."""
        answered = tuple(f"{key}: " for key in self.answers)
        kept = [reason for reason in reasons if not reason.startswith(answered)]
        return (*kept, *reasons_of(self.answers))

    def _with_text(self, proposal: Proposal, plan: Plan, region: ObservedRegion) -> Proposal | None:
        """Return ``proposal`` with a variant of its ``plan`` that also shards text; None if no such plan is
        exact.

        The plan must be exact as it is, and with replicated text, which a user can choose.
        """
        text = region.text_parameter()
        if text is None:
            return None
        lengths = (region.start.entries, (text.length, text.length))
        for candidate in variants_with_sharded_text(region, plan):
            try:
                variant = with_answers(candidate.plan, self.answers, self.check.module)
                replicated = variant.with_replicated(TEXT)
            # An answer may be None for a parameter to which the variant gives a rule under a wider name, or split
            # text together with other entries.
            except ValueError:
                continue
            try:
                errors = [self.check.measure_error(x, *lengths) for x in (variant, replicated)]
            except InexactPlanError:
                continue
            error = max(*errors, proposal.error or 0.0)
            reasons = self._with_answers((*_reasons_in(variant, proposal.reasons), *candidate.reasons))
            return replace(proposal, plan=variant, error=error, reasons=reasons)
        return None

    def _with_gathered_modules(
        self, proposal: Proposal, region: ObservedRegion
    ) -> _WithGatheredModules | None:
        """Return ``proposal`` with a plan in which modules that failed, or differed, are given all tokens.

        None if no such plan is exact.
        """
        module, entries, much = self.check.module, region.start.entries, False
        for _ in range(_MOST_GATHERED_MODULES):
            if proposal.plan is None:
                return None
            name = self.check.find_difference(proposal.plan, entries).module
            candidate = with_gathered_module(module, region, proposal.plan, name, self.check.examples)
            if candidate is None:
                return None
            much = much or computes_much(module, region, name)
            reasons = (*proposal.reasons, *candidate.reasons)
            proposal = replace(proposal, plan=candidate.plan, reasons=reasons)
            try:
                error = self.check.measure_error(candidate.plan, entries)
            except InexactPlanError:
                continue
            return _WithGatheredModules(replace(proposal, error=error), computes_much=much)
        return None


@dataclass(frozen=True)
class _WithGatheredModules:
    """A proposal with modules before which tokens are gathered, and whether every rank then computes much for all."""

    proposal: Proposal
    computes_much: bool


def reasons_of(answers: Answers) -> tuple[str, ...]:
    """Return a sentence for each answer."""
    return tuple(f"{key}: from answers." for key in answers)


def _reasons_in(plan: Plan, reasons: tuple[str, ...]) -> list[str]:
    """Return the reasons without those for parameters and outputs that ``plan`` has no rule for."""
    kept = []
    for reason in reasons:
        module_and_key = split_name(reason.partition(": ")[0])
        if module_and_key is not None:
            module, key = module_and_key
            rules: Mapping[Any, ShardRule] = plan.inputs
            if module:
                rules = plan.inner.get(module, {})
            if key not in rules:
                continue
        kept.append(reason)
    return kept
