"""Complete a proposal whose plan is exact: the block stack, and the dims of samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from para_core.adapters.propose.overrides import Answers
from para_core.adapters.propose.plan_check import PlanCheck
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.region import ObservedRegion
from para_core.adapters.propose.samples import DependentSamplesError, with_samples
from para_core.adapters.propose.stack import StackGuess, guess_stacks
from para_core.comparison.cached_call import CachedCallError, error_of_cached_call


def complete_proposal(
    proposal: Proposal, check: PlanCheck, answers: Answers, region: ObservedRegion | None
) -> Proposal:
    """Return ``proposal`` with its block stack, and with ``batched`` and ``common`` in its plan.

    ``region`` is None if answers gave the plan.
    """
    proposal = _add_blocks(proposal, check, answers, region)
    if "samples" in answers:
        return _add_given_samples(proposal, check, answers["samples"])
    samples = None if region is None else region.samples()
    return _ask_about_samples(proposal, check, samples)


def _add_given_samples(proposal: Proposal, check: PlanCheck, samples: int | None) -> Proposal:
    """Return ``proposal`` with sample dims, or a question if the ``samples`` of an answer depend on each other."""
    if proposal.plan is None or samples is None:
        return proposal
    try:
        plan = with_samples(check.module, proposal.plan, check.examples[0], samples, check.tolerance)
    except DependentSamplesError as error:
        return _with_question(proposal, f"samples: {error}")
    return replace(proposal, plan=plan)


def _ask_about_samples(proposal: Proposal, check: PlanCheck, samples: int | None) -> Proposal:
    """Return ``proposal`` with a question about its samples, unless these depend on each other."""
    if proposal.plan is None or samples is None:
        return proposal
    try:
        with_samples(check.module, proposal.plan, check.examples[0], samples, check.tolerance)
    except DependentSamplesError:
        return proposal
    return _with_question(
        proposal,
        f"samples: does a call compute all CFG branches? Its {samples} samples do not depend on each other: "
        f"with answers={{'samples': {samples}}} they are split over the batch mesh dim. A pipeline "
        "that calls the model once for each branch needs no answer.",
    )


def _add_blocks(
    proposal: Proposal, check: PlanCheck, answers: Answers, region: ObservedRegion | None
) -> Proposal:
    """Return ``proposal`` with the first block stack with which a call that skips blocks is exact, or a
    question.
    """
    answer, inputs = answers.get("CachedBlocks"), check.examples[0]
    if answer is None and "CachedBlocks" in answers:
        return proposal
    guesses: Iterable[StackGuess] = ()
    if answer is not None:
        guesses = [StackGuess(answer, inputs)]
    elif region is not None:
        guesses = guess_stacks(check.module, region, inputs, check.tolerance)
    problem = "No guess was exact."
    for guess in guesses:
        try:
            error = error_of_cached_call(check.module, guess.blocks, guess.inputs, check.tolerance)
        except CachedCallError as failure:
            problem = f"With the guess {guess.blocks} {failure}."
            continue
        reasons = (*proposal.reasons, *_describe_groups(guess), *guess.reasons)
        return replace(proposal, blocks=guess.blocks, blocks_error=error, reasons=reasons)
    question = "CachedBlocks: which parameters of its blocks do they return updated, in which order?"
    return _with_question(proposal, f"{question} {problem}")


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
