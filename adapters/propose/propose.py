"""Proposing a plan for a model: watch it, guess, and check each guess against the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.propose.answers import Answers, answered, require_answers, with_samples
from para_core.adapters.propose.candidates import Candidate, Region, Start, region, starts
from para_core.adapters.propose.observe import Observation, observe
from para_core.adapters.propose.source import source_of
from para_core.adapters.propose.stack import cached_error, error_of, guess_blocks
from para_core.adapters.propose.virtual_ranks import fresh, run_on_virtual_ranks
from para_core.cache.blocks import CachedBlocks
from para_core.instance import original_class, uncompiled
from para_core.plans.plan import Plan

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
        for candidate in of_start.candidates():
            plan = answered(candidate.plan, said)
            if repr(plan) in failures:
                continue
            tried = _try_all(module, plan, example_inputs, start)
            if isinstance(tried, float):
                proposal = Proposal(name, plan, error=tried, reasons=_reasons(candidate, said))
                proposal = _with_blocks(module, proposal, of_start, small, said)
                return _with_samples(module, proposal, small, said)
            failures[repr(plan)] = plan, f"{start.block}: {tried}"
    likeliest = next(iter(failures.values()), (None, "attention has lengths that are not those of the tokens."))
    return Proposal(name, questions=_questions(found, likeliest[1], *watched), guess=likeliest[0])


def _reasons(candidate: Candidate, said: Answers) -> tuple[str, ...]:
    """Of what was guessed, and of what was said instead."""
    instead = tuple(f"{name}: " for name in said)
    kept = [reason for reason in candidate.reasons if not reason.startswith(instead)]
    return (*kept, *[f"{name}: was said." for name in said])


def _uneven_meshes(tokens: int) -> tuple[tuple[int, int], ...]:
    """ring × ulysses: each alone, of so many ranks that their parts of ``tokens`` differ. Equal parts hide what is wrong."""
    ranks = next(ranks for ranks in count(2) if tokens % ranks)
    return ((1, ranks), (ranks, 1))


def _try_all(
    module: nn.Module, plan: Plan, example_inputs: tuple[Mapping[str, Any], Mapping[str, Any]], start: Start
) -> float | str:
    """The largest error of ``plan`` at both sizes, or what is wrong with it. Most plans fail at once."""
    largest = 0.0
    for inputs, tokens in zip(example_inputs, start.tokens, strict=True):
        tried = _try(module, plan, inputs, _uneven_meshes(tokens))
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


def _with_samples(module: nn.Module, proposal: Proposal, inputs: Mapping[str, Any], said: Answers) -> Proposal:
    if proposal.plan is None or "samples" not in said:
        return proposal
    plan = with_samples(module, proposal.plan, inputs, said["samples"])
    if isinstance(plan, str):
        return replace(proposal, questions=(*proposal.questions, f"samples: {plan}"))
    return replace(proposal, plan=plan)


def _with_blocks(
    module: nn.Module, proposal: Proposal, of_start: Region, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    blocks, error = said.get("CachedBlocks", guess_blocks(of_start)), None
    question = "CachedBlocks: which parameters of its blocks they return changed, in which order? No guess was exact."
    if blocks is not None:
        try:
            error = cached_error(module, blocks, inputs)
        except Exception as failure:
            question = f"CachedBlocks: the guess {blocks} failed: {type(failure).__name__}: {failure}"
    if blocks is None or error is None or not error < _tolerance_of(module):
        return replace(proposal, questions=(question,))
    why = [
        f"{' and '.join(stage.lists)}: blocks that hand on {' and '.join(stage.streams)}"
        + (", and are given the same other arguments." if stage.chained else ", with something else in between.")
        for stage in blocks.stages
    ]
    return replace(proposal, blocks=blocks, blocks_error=error, reasons=(*proposal.reasons, *why))


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
