"""Proposing a plan for a model: watch it, guess, and check each guess against the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.propose.answers import OF_PARAMETER, Answers, answered, require_answers, with_samples
from para_core.adapters.propose.candidates import WHOLE, Candidate, Region, Start, region, starts
from para_core.adapters.propose.left_out import Stack, stacks
from para_core.adapters.propose.observe import Observation, observe
from para_core.adapters.propose.source import source_of
from para_core.adapters.propose.stack import cached_error, error_of
from para_core.adapters.propose.text import with_sharded_text
from para_core.cache.blocks import CachedBlocks
from para_core.instance import original_class, uncompiled
from para_core.plans.plan import Plan
from para_core.verify.virtual_ranks import fresh, run_on_virtual_ranks

# ‖out − expected‖ / ‖expected‖, by the type of the numbers in which the model computes.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Proposal:
    """What was found of a model, and what was not. Print it, or take its :meth:`source`.

    Args:
        transformer: name of its class.
        plan: None where no guess was exact.
        guess: then the likeliest one, for a person to correct.
        blocks: its block stack for First Block Cache; None where no guess was exact.
        error: of the plan, on virtual ranks, against the model alone: the largest ``‖out − expected‖ / ‖expected‖``.
        blocks_error: likewise of a call that skipped blocks.
        reasons: a sentence for each guess.
        questions: what has to be said by hand.
    """

    transformer: str
    plan: Plan | None = None
    blocks: CachedBlocks | None = None
    error: float | None = None
    blocks_error: float | None = None
    reasons: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    guess: Plan | None = None

    def adapter(self) -> Adapter:
        """What was found, for ``parallelize_pipe(pipe, adapter=...)`` and its like.

        Raises:
            ValueError: no plan was found.
        """
        if self.plan is None:
            raise ValueError(f"no plan was found for {self.transformer}: {' '.join(self.questions)}")
        return Adapter(self.transformer, self.transformer, self.plan, blocks=self.blocks)

    def source(self) -> str:
        """A module for adapters/models/, as text.

        Raises:
            ValueError: no plan was found.
        """
        return source_of(self.adapter())

    def __str__(self) -> str:
        lines = [f"{self.transformer}: " + ("no plan found" if self.plan is None else f"exact to {self.error:.1e}")]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"? {question}" for question in self.questions]
        if self.plan is not None:
            return "\n".join([*lines, "", self.source()])
        if self.guess is not None:
            lines += ["", "The likeliest guess:", source_of(Adapter(self.transformer, self.transformer, self.guess))]
        return "\n".join(lines)


def propose_plan(
    transformer: nn.Module,
    example_inputs: tuple[Mapping[str, Any], Mapping[str, Any]],
    *,
    segment: str = "image",
    answers: Answers | None = None,
) -> Proposal:
    """Propose what ``transformer`` shards and gathers, and its block stack, from two calls of it on this device.

    What is in the proposal has been checked: the plan on virtual ranks (threads of this process) against the unmodified
    model, the block stack by a call that skips blocks. The checks cover what the examples give: arguments that they leave out
    are not in the plan. Text is kept on every rank. Runs the model up to some hundred times, so give it small sizes.

    Args:
        transformer: any module with its blocks in module lists, which attends by ``scaled_dot_product_attention``; its
            parameters must not be zeros, which hide what is wrong. It is not changed.
        example_inputs: keyword arguments of two calls that differ in one thing only: the second has more image (video,
            sound) tokens, by some ten, than the first. The number of text tokens and of samples must be the same, and no other
            length equal to either number of image tokens.
        segment: what the plan shall call these tokens.
        answers: what is known of the model, in place of what would be guessed, by the names that ``questions`` and ``reasons`` have:
            ``"blocks.*(rotary)"``: a :class:`Split` or its like, or None for nothing; ``"proj_out"``: a :class:`Gather` of what it returns;
            ``"blocks.*.attn"``: a tuple of :class:`Attention`; ``"joint_order"``; ``"CachedBlocks"``; and ``"samples"``: how many the
            examples hold, of a model whose call has all branches of guidance in one batch. They are checked like guesses.

    Raises:
        TypeError: ``example_inputs`` are no two dicts of arguments, or an answer is none that can be given to its name.
        ValueError: nothing in the model's blocks grows from the first call to the second.
    """
    module = uncompiled(transformer)
    name = original_class(module).__name__
    if len(example_inputs) != 2 or not all(isinstance(one, Mapping) for one in example_inputs):
        kinds = [type(one).__name__ for one in example_inputs]
        raise TypeError(f"example_inputs holds {kinds}; expected two dicts of arguments: (of fewer tokens, of more).")
    said = answers or {}
    require_answers(said)
    small, large = example_inputs
    watched = observe(module, small), observe(module, large)
    found = [*starts(*watched)]
    if not found:
        raise ValueError(_nothing_grows(name, watched[0]))
    failures: dict[str, tuple[Plan, str]] = {}
    for start in found:
        of_start = region(module, small, watched[1], start, segment)
        likeliest_here: Proposal | None = None
        for candidate in of_start.candidates():
            plan = answered(candidate.plan, said)
            if repr(plan) in failures:
                continue
            proposal = Proposal(name, plan, error=0.0, reasons=_reasons(candidate, said))
            tried = _try_all(module, plan, example_inputs, start.tokens)
            if isinstance(tried, float):
                proposal = replace(proposal, error=tried)
                proposal = _with_text(module, proposal, of_start, example_inputs, said) or proposal
                return _complete(module, proposal, of_start, small, said)
            likeliest_here = likeliest_here or proposal
            failures[repr(plan)] = plan, f"{start.block}: {tried}"
        # Where the blocks are given what has entries of both, text may be sharded at the model's inputs though not replicated here.
        sharded = likeliest_here and _with_text(module, likeliest_here, of_start, example_inputs, said)
        if sharded is not None:
            return _complete(module, sharded, of_start, small, said)
    likeliest = next(iter(failures.values()), (None, "attention has lengths that are not those of the tokens."))
    return Proposal(name, questions=_questions(found, likeliest[1], *watched), guess=likeliest[0])


def _with_text(
    module: nn.Module,
    proposal: Proposal,
    of_start: Region,
    example_inputs: tuple[Mapping[str, Any], Mapping[str, Any]],
    said: Answers,
) -> Proposal | None:
    """``proposal`` with text sharded, too; None where that is not exact, or not with text on every rank by the same plan."""
    text = of_start.whole_stream()
    if proposal.plan is None or text is None:
        return None
    lengths = [(tokens, of_start.length(text)) for tokens in of_start.start.tokens]
    for candidate in with_sharded_text(of_start, proposal.plan):
        plan = answered(candidate.plan, said)
        errors = []
        for variant in (plan, plan.with_replicated(WHOLE)):
            tried = _try_all(module, variant, example_inputs, *zip(*lengths, strict=True))
            if isinstance(tried, str):
                break
            errors.append(tried)
        else:
            reasons = [reason for reason in proposal.reasons if _is_of(reason, plan)]
            error = max(*errors, proposal.error or 0.0)
            return replace(proposal, plan=plan, error=error, reasons=(*reasons, *candidate.reasons))
    return None


def _is_of(reason: str, plan: Plan) -> bool:
    """Whether ``plan`` still has the entry that ``reason`` is about: ``module(parameter): …``."""
    place = OF_PARAMETER.fullmatch(reason.partition(": ")[0])
    return place is None or place[2] in plan.inner.get(place[1], {})


def _reasons(candidate: Candidate, said: Answers) -> tuple[str, ...]:
    """Of what was guessed, and of what was said instead."""
    instead = tuple(f"{name}: " for name in said)
    kept = [reason for reason in candidate.reasons if not reason.startswith(instead)]
    return (*kept, *[f"{name}: was said." for name in said])


def _uneven_meshes(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """ring × ulysses: each alone, of so many ranks that their parts of each length differ. Equal parts hide what is wrong."""
    ranks = next(ranks for ranks in count(2) if all(length % ranks for length in lengths))
    return ((1, ranks), (ranks, 1))


def _try_all(
    module: nn.Module,
    plan: Plan,
    example_inputs: tuple[Mapping[str, Any], Mapping[str, Any]],
    *lengths: Sequence[int],
) -> float | str:
    """The largest error of ``plan`` at both sizes, or what is wrong with it. Most plans fail at once.

    Args:
        lengths: of each segment that is sharded, its tokens in the one call and in the other.
    """
    largest = 0.0
    for inputs, of_call in zip(example_inputs, zip(*lengths, strict=True), strict=True):
        tried = _try(module, plan, inputs, _uneven_meshes(of_call))
        if isinstance(tried, str):
            return tried
        largest = max(largest, tried)
    return largest


def _try(module: nn.Module, plan: Plan, inputs: Mapping[str, Any], meshes: Sequence[tuple[int, int]]) -> float | str:
    """The largest error of ``plan``, or what is wrong with it."""
    with torch.no_grad():
        expected = module(**fresh(inputs))
    largest = 0.0
    for ring, ulysses in meshes:
        try:
            outs = run_on_virtual_ranks(module, plan, inputs, ring=ring, ulysses=ulysses)
        # Wrong plans make models fail in any way.
        except Exception as failure:
            return f"on {ring} × {ulysses} ranks: {type(failure).__name__}: {failure}"
        largest = max(largest, *[error_of(out, expected) for out in outs])
        if not largest < _tolerance_of(module):
            return f"on {ring} × {ulysses} ranks its result is {largest:.1e} from that of the model alone."
    return largest


def _tolerance_of(module: nn.Module) -> float:
    return _TOLERANCE.get(next(module.parameters()).dtype, 1e-5)


def _complete(
    module: nn.Module, proposal: Proposal, of_start: Region, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    """With all that is not the plan's sharding."""
    return _with_samples(module, _with_blocks(module, proposal, of_start, inputs, said), of_start, inputs, said)


def _with_samples(
    module: nn.Module, proposal: Proposal, of_start: Region, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    """``batched`` and ``common`` where ``samples`` is said; else a question, if samples do not depend on each other."""
    samples = said.get("samples", of_start.samples())
    if proposal.plan is None or samples is None:
        return proposal
    plan = with_samples(module, proposal.plan, inputs, samples)
    if "samples" not in said:
        if isinstance(plan, str):
            return proposal
        question = (
            f"samples: does a call hold all branches of guidance? Its {samples} samples do not depend on each other: with "
            f"answers={{'samples': {samples}}} ranks along a batch mesh dim share them. A pipeline that calls it once for each branch "
            "needs nothing."
        )
        return replace(proposal, questions=(*proposal.questions, question))
    if isinstance(plan, str):
        return replace(proposal, questions=(*proposal.questions, f"samples: {plan}"))
    return replace(proposal, plan=plan)


def _with_blocks(
    module: nn.Module, proposal: Proposal, of_start: Region, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    question = "CachedBlocks: which parameters of its blocks they return changed, in which order? No guess was exact."
    tolerance = _tolerance_of(module)
    answer = said.get("CachedBlocks")
    guesses = stacks(module, of_start, inputs, tolerance) if answer is None else [Stack(answer, inputs)]
    for guess in guesses:
        try:
            error = cached_error(module, guess.blocks, guess.inputs)
        # What is wrong with a guess makes models fail in any way.
        except Exception as failure:
            question = f"CachedBlocks: the guess {guess.blocks} failed: {type(failure).__name__}: {failure}"
            continue
        if error is not None and error < tolerance:
            why = (*_reasons_of_stages(guess.blocks), *guess.reasons)
            return replace(proposal, blocks=guess.blocks, blocks_error=error, reasons=(*proposal.reasons, *why))
    return replace(proposal, questions=(*proposal.questions, question))


def _reasons_of_stages(blocks: CachedBlocks) -> list[str]:
    return [
        f"{' and '.join(stage.lists)}: blocks that hand on {' and '.join(stage.streams)}"
        + (", and are given the same other arguments." if stage.chained else ", with something else in between.")
        for stage in blocks.stages
    ]


def _nothing_grows(name: str, seen: Observation) -> str:
    lists = sorted({call.block_list for call in seen.calls if call.block_list is not None})
    if not seen.attention:
        return f"{name} called no scaled_dot_product_attention: switch its attention to a native backend, or it has no plan."
    return (
        f"no stream of tokens of {name}'s module lists {lists} is longer in the second call than in the first, in one dim. Give "
        "two calls that differ in the number of image tokens."
    )


def _questions(found: list[Start], failure: str, small: Observation, large: Observation) -> tuple[str, ...]:
    """What a person has to say, by name: in ``answers``."""
    numbers = {
        f"{call.block_list}.*({parameter}): is it a number of tokens? FirstTokens and LastTokens shard those."
        for call, other in zip(small.calls, large.calls, strict=False)
        for parameter, value in call.given.items()
        if call.block_list is not None and isinstance(value, int) and value != other.given.get(parameter)
    }
    begin = f"No plan that begins at {' or '.join(start.block for start in found)} was exact."
    return (
        *sorted(numbers),
        f"{begin} The likeliest guess failed thus: {failure} What it has wrong goes into propose_plan(..., answers=).",
    )
