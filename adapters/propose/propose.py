"""Proposing a plan for a model: watch it, guess, and check each guess against the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from para_core.adapters.propose.candidates import WHOLE, Candidate, Region, Start, region, starts
from para_core.adapters.propose.observe import ObservedCall, observe
from para_core.adapters.propose.one_size import imagined_larger
from para_core.adapters.propose.optional_arguments import Stack, stacks
from para_core.adapters.propose.overrides import (
    OF_PARAMETER,
    Answers,
    answered,
    is_whole,
    require_answers,
    with_samples,
)
from para_core.adapters.propose.source import source_of
from para_core.adapters.propose.stack import cached_error, error_of
from para_core.adapters.propose.text import with_sharded_text
from para_core.adapters.spec import Adapter
from para_core.cache.blocks import CachedBlocks
from para_core.instance_patching import original_class, uncompiled
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
    example_inputs: Sequence[Mapping[str, Any]],
    *,
    segment: str = "image",
    answers: Answers | None = None,
) -> Proposal:
    """Propose what ``transformer`` shards and gathers, and its block stack, from two calls of it on this device.

    What is in the proposal has been checked: the plan on virtual ranks (threads of this process) against the unmodified
    model, the block stack by a call that skips blocks. The checks cover what the examples give: arguments that they leave out
    are not in the plan. Text is kept on every rank. Runs the model up to some hundred times, so give it small sizes.

    Args:
        transformer: any module which attends by ``scaled_dot_product_attention``; its parameters must not be zeros, which hide what
            is wrong. It is not changed.
        example_inputs: keyword arguments of two calls that differ in one thing only: the second has more image (video,
            sound) tokens, by some ten, than the first. The number of text tokens and of samples must be the same, and no other
            length equal to either number of image tokens. Of a model that accepts one size only, that call alone: ``(inputs,)``.
        segment: what the plan shall call these tokens.
        answers: what is known of the model, in place of what would be guessed, by the names that ``questions`` and ``reasons`` have.
            None means nothing, and ends its question. They are checked like guesses.

            - ``"blocks.*(rotary)"``, ``"(hidden_states)"`` of the model itself, ``"embed(0)"`` for a module's output: a :class:`Split` or
              its like. A split of a segment replaces the guess of where that segment is sharded.
            - ``"proj_out"``: a :class:`Gather` of what it returns, or a tuple of them.
            - ``"blocks.*.attn"``: a tuple of :class:`Attention`, :class:`OneForEach` or :class:`LinearAttention`; or a :class:`Halo`.
            - ``"joint_order"``, ``"batched"``, ``"common"``, ``"unshared"``, ``"refused"``: as in a :class:`Plan`; ``"plan"``: all of it.
            - ``"CachedBlocks"``; ``"samples"``: how many the examples hold, of a model whose call has all branches of guidance in one batch.

    Raises:
        TypeError: ``example_inputs`` are no dicts of arguments, or an answer is none that can be given to its name.
        ValueError: nothing in the model's blocks grows from the first call to the second, it cannot be called with the second, or its
            attention cannot be seen.
    """
    module = uncompiled(transformer)
    name = original_class(module).__name__
    examples = _checked_examples(example_inputs)
    said = answers or {}
    require_answers(said)
    small = examples[0]
    failures: dict[str, tuple[Plan, str]] = {}
    pairs = [*_observations(module, name, examples)]
    found = [(start, large) for seen, large in pairs for start in starts(seen, large)]
    if not found and not is_whole(said):
        raise ValueError(_nothing_grows(name, module, *pairs[0]))
    for start, large in found:
        of_start = region(module, small, large, start, segment)
        likeliest_here: Proposal | None = None
        for candidate in of_start.candidates():
            plan = answered(candidate.plan, said)
            if repr(plan) in failures:
                continue
            proposal = Proposal(name, plan, error=0.0, reasons=_reasons(candidate, said))
            tried = _try_all(module, plan, examples, start.tokens)
            if isinstance(tried, float):
                proposal = replace(proposal, error=tried)
                proposal = _with_text(module, proposal, of_start, examples, said) or proposal
                return _complete(module, proposal, of_start, small, said)
            likeliest_here = likeliest_here or proposal
            failures[repr(plan)] = plan, f"{start.block}: {tried}"
        # Where the blocks are given what has entries of both, text may be sharded at the model's inputs though not replicated here.
        sharded = likeliest_here and _with_text(module, likeliest_here, of_start, examples, said)
        if sharded is not None:
            return _complete(module, sharded, of_start, small, said)
    if is_whole(said):
        plan = answered(Plan({}, {}, (segment,)), said)
        tried = _try_all(module, plan, examples)
        if isinstance(tried, float):
            proposal = Proposal(name, plan, error=tried, reasons=tuple(f"{one}: was said." for one in said))
            return _complete(module, proposal, None, small, said)
        failures = {repr(plan): (plan, f"all of it was said: {tried}"), **failures}
    likeliest = next(iter(failures.values()), (None, "attention has lengths that are not those of the tokens."))
    asked = _questions([start for start, _ in found], likeliest[1], *pairs[0])
    return Proposal(name, questions=_unanswered(asked, said), guess=likeliest[0])


def _checked_examples(example_inputs: Any) -> tuple[Mapping[str, Any], ...]:
    listed = isinstance(example_inputs, (list, tuple))
    kinds = [type(one).__name__ for one in example_inputs] if listed else type(example_inputs).__name__
    if not listed or len(example_inputs) not in (1, 2) or not all(isinstance(one, Mapping) for one in example_inputs):
        raise TypeError(
            f"example_inputs holds {kinds}; expected two dicts of arguments: (of fewer tokens, of more). Of a model that accepts one "
            "size only, a tuple of one dict."
        )
    return tuple(example_inputs)


def _observations(
    module: nn.Module, name: str, examples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[ObservedCall, ObservedCall]]:
    """The calls of both sizes. Of one size, that call, and what it would be with one token more: as many as there are readings.

    Raises:
        ValueError: the model fails with the second example.
    """
    seen = observe(module, examples[0])
    if len(examples) == 1:
        larger = [*imagined_larger(seen)]
        yield from [(seen, one) for one in larger or [seen]]
        return
    try:
        large = observe(module, examples[1])
    # A model may fail in any way at a size that it does not accept.
    except Exception as error:
        raise ValueError(
            f"{name} runs with the first example, and fails with the second: {type(error).__name__}: {error} If it accepts one size "
            "only (its position embedding has a fixed length, say), give one example: example_inputs=(inputs,)."
        ) from error
    yield seen, large


def _with_text(
    module: nn.Module,
    proposal: Proposal,
    of_start: Region,
    example_inputs: Sequence[Mapping[str, Any]],
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


# ring × ulysses, of a plan whose lengths are not known: parts of few lengths are equal on 2 and on 3 ranks.
_SOME_MESHES = ((1, 2), (2, 1), (1, 3), (3, 1))


def _uneven_meshes(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """ring × ulysses: each alone, of so many ranks that their parts of each length differ. Equal parts hide what is wrong."""
    ranks = next(ranks for ranks in count(2) if all(length % ranks for length in lengths))
    return ((1, ranks), (ranks, 1))


def _try_all(
    module: nn.Module,
    plan: Plan,
    example_inputs: Sequence[Mapping[str, Any]],
    *lengths: Sequence[int],
) -> float | str:
    """The largest error of ``plan`` at both sizes, or what is wrong with it. Most plans fail at once.

    Args:
        lengths: of each segment that is sharded, its tokens in the one call and in the other; none if they are not known.
    """
    largest = 0.0
    for i, inputs in enumerate(example_inputs):
        meshes = _uneven_meshes([of_segment[i] for of_segment in lengths]) if lengths else _SOME_MESHES
        tried = _try(module, plan, inputs, meshes)
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
    module: nn.Module, proposal: Proposal, of_start: Region | None, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    """With all that is not the plan's sharding."""
    return _with_samples(module, _with_blocks(module, proposal, of_start, inputs, said), of_start, inputs, said)


def _with_samples(
    module: nn.Module, proposal: Proposal, of_start: Region | None, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    """``batched`` and ``common`` where ``samples`` is said; else a question, if samples do not depend on each other."""
    samples = said.get("samples", None if of_start is None else of_start.samples())
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
    module: nn.Module, proposal: Proposal, of_start: Region | None, inputs: Mapping[str, Any], said: Answers
) -> Proposal:
    if "CachedBlocks" in said and said["CachedBlocks"] is None:
        return proposal
    question = "CachedBlocks: which parameters of its blocks they return changed, in which order? No guess was exact."
    tolerance = _tolerance_of(module)
    answer = said.get("CachedBlocks")
    guesses: Iterable[Stack] = () if answer is None else [Stack(answer, inputs)]
    if answer is None and of_start is not None:
        guesses = stacks(module, of_start, inputs, tolerance)
    for guess in guesses:
        try:
            error = cached_error(module, guess.blocks, guess.inputs)
        # What is wrong with a guess makes models fail in any way.
        except Exception as failure:
            question = f"CachedBlocks: the guess {guess.blocks} failed: {type(failure).__name__}: {failure}"
            continue
        if error is not None and error < tolerance:
            why = (*_reasons_of_groups(guess.blocks), *guess.reasons)
            return replace(proposal, blocks=guess.blocks, blocks_error=error, reasons=(*proposal.reasons, *why))
    return replace(proposal, questions=(*proposal.questions, question))


def _reasons_of_groups(blocks: CachedBlocks) -> list[str]:
    return [
        f"{' and '.join(group.lists)}: blocks that hand on {' and '.join(group.streams)}"
        + (", and are given the same other arguments." if group.chained else ", with something else in between.")
        for group in blocks.groups
    ]


def _unanswered(questions: Iterable[str], said: Answers) -> tuple[str, ...]:
    return tuple(question for question in questions if question.partition(": ")[0] not in said)


def _nothing_grows(name: str, module: nn.Module, seen: ObservedCall, large: ObservedCall) -> str:
    """Why no stream of tokens was found."""
    if not seen.attention:
        by_hand = [f"{place or name} (over {list(shape)})" for place, shape in seen.softmax.items()]
        if by_hand:
            return (
                f"{name} called no scaled_dot_product_attention, but computes a softmax itself: in {', '.join(by_hand[:3])}. "
                "Attention that is written by hand cannot be seen. Switch the model to its fused attention (some call it flash), or write "
                "F.scaled_dot_product_attention there."
            )
        return f"{name} called no scaled_dot_product_attention: switch its attention to a native backend, or it has no plan."
    lists = sorted({call.block_list for call in seen.calls if call.block_list is not None})
    at = sorted({one.name for one in seen.attention})
    lengths = [sorted({one.queries for one in one_call.attention}) for one_call in (seen, large)]
    if lengths[0] == lengths[1]:
        return (
            f"no stream of tokens of {name}'s module lists {lists} is longer in the second call than in the first, in one dim: its "
            f"attention has {lengths[0]} queries in both. Give two calls that differ in the number of image tokens."
        )
    return (
        f"attention of {name} has {lengths[0]} queries in the first call and {lengths[1]} in the second (in {', '.join(at[:3])}), but no "
        f"block of its module lists {lists}, and no module around them, is given a tensor [B, S, C] that grows in one dim. Say where "
        "tokens are sharded and gathered: answers={'module(parameter)': Split(dim, segment=...), 'module': Gather(dim, ...)}."
    )


def _questions(found: list[Start], failure: str, small: ObservedCall, large: ObservedCall) -> tuple[str, ...]:
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
        f"{begin} The likeliest guess failed thus: {failure.rstrip('.')}. What it has wrong goes into propose_plan(..., answers=).",
    )
