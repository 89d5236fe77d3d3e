"""Complete a proposal whose plan is exact: the block stack, and the dims of samples.

``propose.py`` calls it. The guesses are made in ``stack.py`` and ``samples.py``. Tests:
tests/adapters/propose/test_completion.py and test_structures.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from para_core.adapters.propose.overrides import Answers
from para_core.adapters.propose.plan_check import PlanCheck
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.region import ObservedRegion
from para_core.adapters.propose.samples import InseparableSamplesError, with_samples
from para_core.adapters.propose.stack import StackGuess, guess_stacks
from para_core.cache.blocks import CachedBlocks
from para_core.comparison.cached_call import CachedCallError, error_of_cached_call
from para_core.plans.plan import Plan


def complete_proposal(
    proposal: Proposal, check: PlanCheck, answers: Answers, region: ObservedRegion | None
) -> Proposal:
    """Return ``proposal`` with its block stack; with ``batched`` and ``common`` in its plan if ``answers``
    have the number of samples, and not ``batched`` itself; and with questions about what is missing.

    Args:
        proposal: A proposal with an exact plan.
        check: Has the model, and calls of it.
        answers: The user's, as :func:`~para_core.adapters.propose.propose.propose_plan` describes them;
            :func:`~para_core.adapters.propose.overrides.require_answers` has checked their types. None as a
            value says that there is no such thing; a missing answer, that it must be found.
        region: The observed region from which the plan was guessed; None if answers gave the plan.

    Raises:
        ValueError: The proposal has no plan.
    """
    plan = proposal.plan
    if plan is None:
        raise ValueError(f"the proposal for {proposal.transformer} has no plan; expected an exact one.")
    declined = {name for name, answer in answers.items() if answer is None}
    if "CachedBlocks" not in declined:
        proposal = _add_blocks(proposal, check, answers.get("CachedBlocks"), region)
    # The dims of samples in a plan are answers, which no guess replaces.
    if "samples" in declined or plan.batched:
        return proposal
    if "samples" in answers:
        return _add_samples(proposal, plan, check, answers["samples"])
    return _ask_about_samples(proposal, plan, check, region)


def _add_samples(proposal: Proposal, plan: Plan, check: PlanCheck, samples: int) -> Proposal:
    """Return ``proposal`` with the dims of ``samples`` in its ``plan``, or with a question that says why the
    number is wrong.
    """
    try:
        plan = with_samples(check.module, plan, check.examples[0], samples, check.tolerance)
    except InseparableSamplesError as error:
        return _with_question(proposal, f"samples: {error}")
    return replace(proposal, plan=plan)


def _ask_about_samples(
    proposal: Proposal, plan: Plan, check: PlanCheck, region: ObservedRegion | None
) -> Proposal:
    """Return ``proposal`` with the question whether the observed samples are CFG branches, if there are
    several and they do not depend on each other.

    To find this out, the model is called with all samples, and once with each.
    """
    samples = None
    if region is not None:
        samples = region.samples()
    if samples is None or samples < 2:
        return proposal
    try:
        with_samples(check.module, plan, check.examples[0], samples, check.tolerance)
    except InseparableSamplesError:
        return proposal
    return _with_question(
        proposal,
        f"samples: does a call compute all CFG branches? Its {samples} samples do not depend on each other: "
        f"with answers={{'samples': {samples}}} they are split over the batch mesh dim. A pipeline "
        "that calls the model once for each branch needs no answer.",
    )


def _add_blocks(
    proposal: Proposal, check: PlanCheck, answer: CachedBlocks | None, region: ObservedRegion | None
) -> Proposal:
    """Return ``proposal`` with the block stack ``answer``; without an answer, with the first guess for
    ``region`` that is exact. If none is, return it with a question.
    """
    inputs = check.examples[0]
    if answer is not None:
        # A call with one of the uncached arguments skips no block, which would look like a wrong answer.
        cached = {name: value for name, value in inputs.items() if name not in answer.uncached}
        question = "CachedBlocks: the answer is not exact, correct it."
        return _add_first_exact(proposal, check, [StackGuess(answer, cached)], question)
    guesses: Iterable[StackGuess] = ()
    if region is not None:
        guesses = guess_stacks(check.module, region, inputs, check.tolerance)
    question = "CachedBlocks: which parameters of its blocks do they return updated, in which order?"
    return _add_first_exact(proposal, check, guesses, question)


def _add_first_exact(
    proposal: Proposal, check: PlanCheck, guesses: Iterable[StackGuess], question: str
) -> Proposal:
    """Return ``proposal`` with the first block stack of ``guesses`` with which a call that skips blocks is
    exact; or with ``question``, and with what is wrong with the first guess.
    """
    problem = ""
    for guess in guesses:
        try:
            error = error_of_cached_call(check.module, guess.blocks, guess.inputs, check.tolerance)
        except CachedCallError as failure:
            # The likeliest guess comes first.
            problem = problem or f" With {guess.blocks} {failure}."
            continue
        reasons = (*proposal.reasons, *_describe_groups(guess), *guess.reasons)
        return replace(proposal, blocks=guess.blocks, blocks_error=error, reasons=reasons)
    return _with_question(proposal, question + problem)


def _describe_groups(guess: StackGuess) -> list[str]:
    sentences = []
    for group in guess.blocks.groups:
        others = "which the model changes between blocks"
        if group.chained:
            others = "with equal other arguments"
        lists, streams = " and ".join(group.lists), " and ".join(group.streams)
        sentences.append(f"{lists}: blocks that return {streams}, {others}.")
    return sentences


def _with_question(proposal: Proposal, question: str) -> Proposal:
    return replace(proposal, questions=(*proposal.questions, question))
