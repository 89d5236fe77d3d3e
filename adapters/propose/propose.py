"""Propose a plan for a model: observe the model, guess, and check each guess against the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.propose.candidates import TEXT, ObservedRegion, Start, starts
from para_core.adapters.propose.observe import ObservedCall, ObservedSoftmax, imagined_larger, observe
from para_core.adapters.propose.overrides import (
    PARAMETER_NAME,
    Answers,
    form_a_plan,
    require_answers,
    with_answers,
    with_samples,
)
from para_core.adapters.propose.proposal import Proposal, expression_of
from para_core.adapters.propose.stack import StackGuess, cached_error, stacks
from para_core.adapters.propose.text import with_sharded_text
from para_core.adapters.propose.whole_modules import computes_much, with_whole_module
from para_core.adapters.registry import require_kind
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.plan import Plan
from para_core.verify.check import find_first_difference
from para_core.verify.first_difference import Difference
from para_core.verify.parts import largest_error
from para_core.verify.runs import ModelInputs, ParallelRun
from para_core.verify.virtual_ranks import fresh, run_on_virtual_ranks

# Relative errors ‖out − expected‖ / ‖expected‖ below which a plan counts as exact, by dtype of the model's parameters.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def propose_plan(
    transformer: nn.Module,
    example_inputs: Sequence[Mapping[str, Any]],
    *,
    segment: str = "image",
    answers: Answers | None = None,
) -> Proposal:
    """Propose what ``transformer`` shards and gathers, and its block stack, from two calls of it on this device.

    The proposal is checked: the plan on virtual ranks (threads of this process) against the unmodified model, the block
    stack by a call that skips blocks. The checks cover the arguments in the examples; other arguments are not in the
    plan. The model runs up to some hundred times, so pass small sizes.

    Args:
        transformer (`nn.Module`): A model that attends with ``scaled_dot_product_attention``. It is not changed.
            Parameters that are zero hide errors, so use trained or random ones.
        example_inputs (`Sequence[Mapping[str, Any]]`): Keyword arguments of two calls that differ in one thing: the
            second has about ten image (video, audio) tokens more than the first. The number of text tokens and of
            samples must be equal, and no other length may equal either number of image tokens. For a model that accepts
            one size only, pass one call: ``(inputs,)``.
        segment (`str`, defaults to `"image"`): Name of these tokens in the plan.
        answers (`Mapping[str, Any]`, *optional*): Known parts of the plan. They replace guesses of the same name, and
            the resulting plan is checked. The names are those in ``questions`` and ``reasons`` of a proposal. None as a
            value means that there is nothing of that name.

            - ``"blocks.*(rotary)"``, ``"(hidden_states)"`` (a parameter of the model), ``"embed(0)"`` (a module's
              output) or ``"blocks.0(video.x)"`` (a field of a dataclass): a :class:`Split` or another rule. A split of
              a segment replaces the guess of where that segment is sharded.
            - ``"proj_out"``: a :class:`Gather` of its output, or a tuple of them.
            - ``"blocks.*.attn"``: a tuple of :class:`Attention`, :class:`OneForEach`, :class:`LinearAttention` or
              :class:`AttentionByHeads`; or a :class:`Halo`.
            - ``"joint_order"``, ``"batched"``, ``"common"``, ``"unshared"``, ``"refused"``: fields of a :class:`Plan`;
              ``"plan"``: a whole plan.
            - ``"CachedBlocks"``: the block stack.
            - ``"samples"``: number of samples in the examples, if one call of the model computes all CFG branches.

    Returns:
        The :class:`Proposal`. If no guess was exact, its ``plan`` is None and its ``questions`` say what is missing.

    Raises:
        TypeError: If ``example_inputs`` does not hold mappings, or an answer has the wrong type for its name.
        ValueError: If no input of the model's blocks grows from the first call to the second, the second call fails, or
            the model does not call scaled_dot_product_attention.
    """
    require_kind("model", transformer, "Pass its transformer: propose_plan(pipe.transformer, ...).")
    module = uncompiled(transformer)
    check_not_fsdp1(module, "transformer")
    check_not_wrapped(module, "transformer")
    examples = _checked_examples(example_inputs)
    require_answers(answers or {})
    # Compile nothing: a mode sees what a function does only in eager code, and flex_attention, for example, compiles
    # itself.
    with torch.compiler.set_stance("force_eager"):
        return _proposal(module, examples, segment, answers or {})


def _proposal(module: nn.Module, examples: Sequence[Mapping[str, Any]], segment: str, answers: Answers) -> Proposal:
    name = original_class(module).__name__
    check = _Check(module, examples, answers)
    failures: dict[str, _Failure] = {}
    observations = [*_observations(module, name, examples)]
    begins = [(start, large) for small_call, large in observations for start in starts(small_call, large)]
    if not begins and not form_a_plan(answers):
        raise ValueError(_nothing_grows(name, *observations[0]))
    for start, large in begins:
        region = ObservedRegion(start, observe(module, examples[0], start.block, start.streams), large, segment)
        proposal = _exact_plan(check, name, region, failures)
        if proposal is not None:
            return check.completed(proposal, region)
    if form_a_plan(answers):
        plan = with_answers(Plan({}, {}, (segment,)), answers)
        error = check.error_or_failure(plan)
        if isinstance(error, float):
            return check.completed(Proposal(name, plan, error=error, reasons=_from_answers(answers)), None)
        failures = {repr(plan): _Failure(plan, f"the plan in answers: {error}"), **failures}
    likeliest = next(iter(failures.values()), None)
    likeliest = next((failure for failure in failures.values() if failure.way_out is not None), likeliest)
    questions = _questions_of([start for start, _ in begins], likeliest, check, *observations[0])
    unanswered = tuple(question for question in questions if question.partition(": ")[0] not in answers)
    return Proposal(name, questions=unanswered, guess=None if likeliest is None else likeliest.plan)


@dataclass(frozen=True)
class _Failure:
    """A plan that was not exact, the reason as a sentence, and the part of the model for which it was guessed.

    ``way_out`` is a plan that is exact, but in which modules that compute much get all tokens on every rank.
    """

    plan: Plan
    reason: str
    region: ObservedRegion | None = None
    way_out: Plan | None = None


# Number of inexact candidates of a start that are tried again with modules that are given all tokens, and the number of
# such modules.
_MOST_WITH_WHOLE_MODULES, _MOST_WHOLE_MODULES = 4, 3


def _from_answers(answers: Answers) -> tuple[str, ...]:
    return tuple(f"{key}: from answers." for key in answers)


def _exact_plan(check: _Check, name: str, region: ObservedRegion, failures: dict[str, _Failure]) -> Proposal | None:
    """Return the first exact plan for ``region``; None if there is none.

    Plans that are not exact are added to ``failures``, by their text. Plans that are among these are not tried again.
    """
    start, answers = region.start, check.answers
    answered = tuple(f"{key}: " for key in answers)
    tried: list[Proposal] = []
    for candidate in region.candidates():
        plan = with_answers(candidate.plan, answers)
        if repr(plan) in failures:
            continue
        kept = [reason for reason in candidate.reasons if not reason.startswith(answered)]
        proposal = Proposal(name, plan, error=0.0, reasons=(*kept, *_from_answers(answers)))
        error = check.error_or_failure(plan, start.entries)
        if isinstance(error, float):
            proposal = replace(proposal, error=error)
            return check.with_text(proposal, region) or proposal
        failures[repr(plan)] = _Failure(plan, f"{start.block}: {error}", region)
        tried.append(proposal)
    # If one tensor holds entries of text and image, only a plan that shards text at the model's inputs can be exact.
    sharded = check.with_text(tried[0], region) if tried else None
    if sharded is not None:
        return sharded
    for proposal in tried[:_MOST_WITH_WHOLE_MODULES]:
        whole = check.with_whole_modules(proposal, region)
        if whole is not None:
            exact, much = whole
            if not much:
                return exact
            failed = failures[repr(proposal.plan)]
            failures[repr(proposal.plan)] = replace(failed, way_out=exact.plan)
            break
    return None


def _checked_examples(example_inputs: Any) -> tuple[Mapping[str, Any], ...]:
    listed = isinstance(example_inputs, (list, tuple))
    kinds = [type(example).__name__ for example in example_inputs] if listed else type(example_inputs).__name__
    if not listed or len(example_inputs) not in (1, 2) or not all(isinstance(x, Mapping) for x in example_inputs):
        raise TypeError(
            f"example_inputs holds {kinds}; expected two dicts of arguments, the smaller call first. For a model that "
            "accepts one size only, pass a tuple of one dict."
        )
    return tuple(example_inputs)


def _observations(
    module: nn.Module, name: str, examples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[ObservedCall, ObservedCall]]:
    """Yield the pair of the two observed calls, or pairs of the only one and each :func:`imagined_larger` call.

    Raises ``ValueError`` if the model fails with the second example.
    """
    observed = observe(module, examples[0])
    if len(examples) == 1:
        larger_calls = [*imagined_larger(observed)]
        yield from [(observed, larger) for larger in larger_calls or [observed]]
        return
    try:
        large = observe(module, examples[1])
    # The model may raise anything at a size that it does not accept.
    except Exception as error:
        raise ValueError(
            f"{name} runs with the first example, and fails with the second: {type(error).__name__}: {error} If it "
            "accepts one size only (for example because its position embedding has a fixed length), pass one example: "
            "example_inputs=(inputs,)."
        ) from error
    yield observed, large


# Meshes as (ring, ulysses), for a plan whose lengths are unknown: most lengths are not divisible by both 2 and 3, so at
# least one mesh has uneven shards.
_SOME_MESHES: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (1, 3), (3, 1))


@dataclass(frozen=True)
class _Check:
    """A model, examples of its calls and the user's answers, with which guesses are checked and completed."""

    module: nn.Module
    examples: Sequence[Mapping[str, Any]]
    answers: Answers

    @property
    def tolerance(self) -> float:
        return _TOLERANCE.get(next(self.module.parameters()).dtype, 1e-5)

    def error_or_failure(self, plan: Plan, *lengths: Sequence[int]) -> float | str:
        """Return the largest relative error of ``plan`` over all examples, or, as a string, what is wrong with it.

        ``lengths`` are, for each sharded segment, its numbers of tokens in the examples; none if unknown.
        """
        largest = 0.0
        for i, inputs in enumerate(self.examples):
            with torch.no_grad():
                expected = self.module(**fresh(inputs))
            for ring, ulysses in self.meshes(i, lengths):
                try:
                    outs = run_on_virtual_ranks(self.module, plan, inputs, ring=ring, ulysses=ulysses)
                # With a wrong plan the model may raise anything, which means that the guess is wrong.
                except Exception as failure:
                    return f"on {ring} × {ulysses} ranks: {type(failure).__name__}: {failure}"
                largest = max(largest, *[largest_error(out, expected) for out in outs])
                if not largest < self.tolerance:
                    return f"on {ring} × {ulysses} ranks its result is {largest:.1e} from that of the unmodified model."
        return largest

    def meshes(self, example: int, lengths: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        """Return the meshes, as (ring, ulysses), on which to check a call with ``example``."""
        if not lengths:
            return _SOME_MESHES
        # Uneven shards reveal errors that equal shards hide: take the fewest ranks that divide no length.
        ranks = next(ranks for ranks in count(2) if all(of_segment[example] % ranks for of_segment in lengths))
        return ((1, ranks), (ranks, 1))

    def difference(self, plan: Plan, *lengths: Sequence[int]) -> Difference:
        """Return the first difference between the unmodified model and ``plan``, in a call with the smaller example.

        ``lengths`` are as in :meth:`error_or_failure`.
        """
        ((_, ranks), *_) = self.meshes(0, lengths)
        inputs, run = ModelInputs((), self.examples[0]), ParallelRun(plan, forward=None, dims={})
        return find_first_difference(self.module, inputs, run, "ulysses", ranks, tolerance=self.tolerance)

    def with_whole_modules(self, proposal: Proposal, region: ObservedRegion) -> tuple[Proposal, bool] | None:
        """Return ``proposal`` with a plan in which modules that failed, or differed, are given all tokens, and whether
        every rank then computes much for all tokens. None if no such plan is exact.
        """
        much = False
        for _ in range(_MOST_WHOLE_MODULES):
            if proposal.plan is None:
                return None
            name = self.difference(proposal.plan, region.start.entries).module
            candidate = with_whole_module(self.module, region, proposal.plan, name, self.examples)
            if candidate is None:
                return None
            much = much or computes_much(self.module, region, name)
            proposal = replace(proposal, plan=candidate.plan, reasons=(*proposal.reasons, *candidate.reasons))
            error = self.error_or_failure(candidate.plan, region.start.entries)
            if isinstance(error, float):
                return replace(proposal, error=error), much
        return None

    def with_text(self, proposal: Proposal, of_start: ObservedRegion) -> Proposal | None:
        """Return ``proposal`` with a plan that also shards text; None if no such plan is exact.

        The plan must be exact as it is, and with replicated text, which a user can choose.
        """
        text = of_start.text_parameter()
        if proposal.plan is None or text is None:
            return None
        text_lengths = [text[2]] * 2
        for candidate in with_sharded_text(of_start, proposal.plan):
            plan = with_answers(candidate.plan, self.answers)
            errors = []
            for variant in (plan, plan.with_replicated(TEXT)):
                error = self.error_or_failure(variant, of_start.start.entries, text_lengths)
                if isinstance(error, str):
                    break
                errors.append(error)
            else:
                entries = [PARAMETER_NAME.fullmatch(reason.partition(": ")[0]) for reason in proposal.reasons]
                reasons = [
                    reason
                    for reason, entry in zip(proposal.reasons, entries, strict=True)
                    if entry is None or entry[2] in plan.inner.get(entry[1], {})
                ]
                error = max(*errors, proposal.error or 0.0)
                return replace(proposal, plan=plan, error=error, reasons=(*reasons, *candidate.reasons))
        return None

    def completed(self, proposal: Proposal, of_start: ObservedRegion | None) -> Proposal:
        """Return ``proposal`` with its block stack, and with ``batched`` and ``common`` in its plan.

        Without ``answers["samples"]`` these two become a question, unless the samples depend on each other.
        """
        proposal, answers = self.with_blocks(proposal, of_start), self.answers
        samples = answers.get("samples", None if of_start is None else of_start.samples())
        if proposal.plan is None or samples is None:
            return proposal
        plan = with_samples(self.module, proposal.plan, self.examples[0], samples)
        if isinstance(plan, Plan) and "samples" in answers:
            return replace(proposal, plan=plan)
        if isinstance(plan, Plan):
            question = (
                f"samples: does a call compute all CFG branches? Its {samples} samples do not depend on each other: "
                f"with answers={{'samples': {samples}}} they are split over the batch mesh dim. A pipeline "
                "that calls the model once for each branch needs no answer."
            )
        elif "samples" in answers:
            question = f"samples: {plan}"
        else:
            return proposal
        return replace(proposal, questions=(*proposal.questions, question))

    def with_blocks(self, proposal: Proposal, of_start: ObservedRegion | None) -> Proposal:
        answer, inputs = self.answers.get("CachedBlocks"), self.examples[0]
        if answer is None and "CachedBlocks" in self.answers:
            return proposal
        question = "CachedBlocks: which parameters of its blocks do they return updated, in which order? "
        problem = "No guess was exact."
        guesses: Iterable[StackGuess] = () if answer is None else [StackGuess(answer, inputs)]
        if answer is None and of_start is not None:
            guesses = stacks(self.module, of_start, inputs, self.tolerance)
        for guess in guesses:
            error = cached_error(self.module, guess.blocks, guess.inputs, self.tolerance)
            if isinstance(error, str):
                problem = f"With the guess {guess.blocks} a call that skips blocks {error}."
            else:
                rest = {True: "with equal other arguments", False: "which the model changes between blocks"}
                why = [
                    f"{' and '.join(x.lists)}: blocks that return {' and '.join(x.streams)}, {rest[x.chained]}."
                    for x in guess.blocks.groups
                ]
                reasons = (*proposal.reasons, *why, *guess.reasons)
                return replace(proposal, blocks=guess.blocks, blocks_error=error, reasons=reasons)
        return replace(proposal, questions=(*proposal.questions, question + problem))


def _nothing_grows(name: str, observed: ObservedCall, large: ObservedCall) -> str:
    """Return the error message for two calls in which no block receives a tensor that grows with the tokens."""
    softmaxes = {softmax.name: softmax for softmax in reversed(observed.softmaxes)}
    handwritten = _handwritten_attention(name, [*reversed(softmaxes.values())])
    if not observed.attention:
        if handwritten:
            return f"{name} called no scaled_dot_product_attention, but {handwritten}"
        return f"{name} called no scaled_dot_product_attention. Switch its attention to a native backend."
    lists = sorted({call.block_list for call in observed.calls if call.block_list is not None})
    modules = sorted({attention.name for attention in observed.attention})
    lengths = [sorted({attention.queries for attention in call.attention}) for call in (observed, large)]
    if lengths[0] == lengths[1]:
        return (
            f"no stream of tokens of {name}'s module lists {lists} is longer in the second call than in the first, in "
            f"one dim: its attention has {lengths[0]} queries in both. "
            + (f"It also {handwritten}" if handwritten else "Pass two calls that differ in the number of image tokens.")
        )
    return (
        f"attention of {name} has {lengths[0]} queries in the first call and {lengths[1]} in the second (in "
        f"{', '.join(modules[:3])}), but no block of its module lists {lists}, and no module that contains them, "
        "receives a tensor [B, S, C] that grows in one dim. State where tokens are sharded and gathered: "
        "answers={'module(parameter)': Split(dim, segment=...), 'module': Gather(dim, ...)}."
    )


def _handwritten_attention(name: str, softmaxes: Sequence[ObservedSoftmax]) -> str:
    """Return which modules compute a softmax themselves, as the end of a sentence; ``""`` if none does."""
    if not softmaxes:
        return ""
    modules = [f"{softmax.name or name} (over {list(softmax.shape)})" for softmax in softmaxes]
    return (
        f"computes a softmax itself: in {', '.join(modules[:3])}. Handwritten attention cannot be intercepted. Switch "
        "the model to its fused attention (some call it flash), or call F.scaled_dot_product_attention there."
    )


def _questions_of(
    begins: list[Start], likeliest: _Failure | None, check: _Check, small: ObservedCall, large: ObservedCall
) -> tuple[str, ...]:
    """Return questions for the user. Each begins with the name under which ``answers`` takes the answer, if it has one.

    ``begins`` are the starts that were tried, and ``likeliest`` is the likeliest plan.
    """
    numbers = {
        f"{call.block_list}.*({parameter}): is it a number of tokens? FirstTokens and LastTokens shard those."
        for call, larger_call in zip(small.calls, large.calls, strict=False)
        for parameter, value in call.arguments.items()
        if call.block_list is not None and isinstance(value, int) and value != larger_call.arguments.get(parameter)
    }
    no_plan = f"No plan that begins at {' or '.join(start.block for start in begins)} was exact."
    if likeliest is None:
        none_fits = (
            "Attention has lengths that are not those of the tokens. State the plan: propose_plan(..., answers=)."
        )
        inner = next((start for start in begins if start.dim > 1), None)
        if inner is not None:
            none_fits += (
                f" In {inner.streams[0]} of {inner.block} dim {inner.dim} grows. If attention flattens it with dims "
                "before it, as in [B, T, H, W, C], pass examples that differ in the first of these, the frames."
            )
        return (*sorted(numbers), f"{no_plan} {none_fits}")
    parts = [no_plan, f"The likeliest guess failed: {likeliest.reason.rstrip('.')}.", _where(check, likeliest)]
    if likeliest.way_out is not None:
        parts.append(_way_out(likeliest.plan, likeliest.way_out))
    parts.append("Correct it with propose_plan(..., answers=).")
    handwritten = [] if likeliest.region is None else likeliest.region.handwritten()
    if handwritten:
        parts.append(f"The model also {_handwritten_attention('the model', handwritten)}")
    return (*sorted(numbers), " ".join(parts))


def _where(check: _Check, failure: _Failure) -> str:
    """Return, as sentences, in which module the plan of ``failure`` first differs, or failed."""
    lengths = [] if failure.region is None else [failure.region.start.entries]
    difference = check.difference(failure.plan, *lengths)
    module = (
        f"{difference.module} ({difference.kind})" if difference.module else f"the model itself ({difference.kind})"
    )
    page = (
        "If it computes positions, lengths or a mask of all tokens, see 'Where positions and lengths come from' in "
        "docs/own_model.md."
    )
    # The error of a rank, which follows its number, is a part of the reason of the failure.
    rank, _, error = difference.reason.partition(": ")
    if rank.startswith("rank ") and error in failure.reason:
        return f"It failed in {module}. {page}"
    size = "" if difference.error is None else f" (by {difference.error:.1e})"
    return f"The first difference is in {module}: {difference.reason}{size}. {page}"


def _way_out(plan: Plan, way_out: Plan) -> str:
    """Return, as a sentence, with which answers ``plan`` becomes the plan ``way_out``."""
    answers = [
        f'"{module}({key})": {expression_of(rule)}'
        for module, rules in way_out.inner.items()
        for key, rule in rules.items()
        if module not in plan.inner
    ]
    return f"It is exact with answers={{{', '.join(answers)}}}, but then every rank computes that for all tokens."
