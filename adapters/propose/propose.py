"""Propose a plan for a model: observe the model, guess, and check each guess against the unmodified model.

The order of the steps, by their files: ``observe.py``, or ``larger_call.py`` for the second call;
``start.py``; ``region.py``; ``search.py``; ``completion.py``; ``questions.py`` if no plan was exact. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.propose.completion import complete_proposal
from para_core.adapters.propose.larger_call import imagine_larger_calls
from para_core.adapters.propose.observe import observe
from para_core.adapters.propose.overrides import Answers, are_a_complete_plan, require_answers, with_answers
from para_core.adapters.propose.plan_check import InexactPlanError, PlanCheck
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.questions import check_that_tokens_grow, write_questions
from para_core.adapters.propose.records import ObservedCall
from para_core.adapters.propose.region import ObservedRegion
from para_core.adapters.propose.search import Failure, Search, reasons_of
from para_core.adapters.propose.start import find_starts
from para_core.adapters.registry import check_pipeline_or_model
from para_core.comparison.virtual_ranks import with_same_weights
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.plan import Plan


def propose_plan(
    transformer: nn.Module,
    example_inputs: Sequence[Mapping[str, Any]],
    *,
    segment: str = "image",
    answers: Answers | None = None,
) -> Proposal:
    """Propose what ``transformer`` shards and gathers, and its block stack, from two calls of it on this
    device.

    The proposal is checked: the plan on virtual ranks (threads of this process) against the unmodified model,
    the block stack by a call that skips blocks. The checks cover the arguments in the examples; other
    arguments are not in the plan. The model runs up to some hundred times, so pass small sizes.

    Args:
        transformer (`nn.Module`): A model that attends with ``scaled_dot_product_attention``. It is not
            changed: a copy with the same weights runs, in eval mode. Parameters that are zero hide errors, so
            use trained or random ones.
        example_inputs (`Sequence[Mapping[str, Any]]`): Keyword arguments of two calls that differ in one
            thing: the second has about ten image (video, audio) tokens more than the first. The number of
            text tokens and of samples must be equal, and no other length may equal either number of image
            tokens. For a model that accepts one size only, pass one call: ``(inputs,)``.
        segment (`str`, defaults to `"image"`): Name of these tokens in the plan.
        answers (`Mapping[str, Any]`, *optional*): Known parts of the plan. They replace guesses of the same
            name, and the resulting plan is checked. The names are those in ``questions`` and ``reasons`` of a
            proposal. None as a value means that there is nothing of that name. If several names match a
            module, the first answer counts, and any answer before a guess.

            - ``"blocks.*(rotary)"``, ``"(hidden_states)"`` (a parameter of the model), ``"embed(0)"`` (a
              module's output) or ``"blocks.0(video.x)"`` (a field of a dataclass): a :class:`Split` or
              another rule. A split of a segment replaces the guess of where that segment is sharded.
            - ``"proj_out"``: a :class:`Gather` of its output, or a tuple or list of them. It replaces all
              guesses of where tokens are gathered.
            - ``"blocks.*.attn"``: a tuple of :class:`Attention`, :class:`OneForEach`,
              :class:`LinearAttention` or :class:`AttentionByHeads`; or a :class:`Halo`.
            - ``"joint_order"``, ``"batched"``, ``"common"``, ``"unshared"``, ``"refused"``: fields of a
              :class:`Plan`; ``"plan"``: a whole plan.
            - ``"CachedBlocks"``: the block stack.
            - ``"samples"``: number of samples in the examples, if one call of the model computes all CFG
              branches. It is not needed with ``"batched"``, which names their dims and is not checked.

    Returns:
        The :class:`Proposal`. If no guess was exact, its ``plan`` is None and its ``questions`` say what is
        missing.

    Raises:
        TypeError: If ``transformer`` is no model or is inside a wrapper for training, if ``example_inputs``
            does not hold mappings, if ``segment`` is no text, or if an answer has the wrong type for its
            name.
        ValueError: If no input of the model's blocks grows from the first call to the second, the second call
            fails, or the model does not call scaled_dot_product_attention. If an answer is None for a module
            or parameter that does not exist; or, if no plan was exact, for one to which a wider name in a
            guess gives a rule.
        RuntimeError: If ``transformer`` cannot be copied.
    """
    check_pipeline_or_model(
        "model", transformer, "Pass its transformer: propose_plan(pipe.transformer, ...)."
    )
    module = uncompiled(transformer)
    check_not_fsdp1(module, "transformer")
    check_not_wrapped(module, "transformer")
    examples = _require_examples(example_inputs)
    if not isinstance(segment, str):
        raise TypeError(f"segment is {segment!r}; expected a name of the tokens, such as 'image'.")
    require_answers(answers or {}, module)
    # Each rank would drop other activations than one device does.
    module = with_same_weights(module).eval()
    # Compile nothing: a mode sees what a function does only in eager code, and flex_attention, for example,
    # compiles itself.
    with torch.compiler.set_stance("force_eager"):
        return _propose(module, examples, segment, answers or {})


def _propose(
    module: nn.Module, examples: Sequence[Mapping[str, Any]], segment: str, answers: Answers
) -> Proposal:
    """Return the proposal for validated arguments of :func:`propose_plan`.

    Guesses are tried start by start, and the first exact plan is taken. If there is none, a complete plan in
    ``answers`` is tried as it is. If that is not exact either, the proposal has questions.

    Raises:
        ValueError: As :func:`propose_plan`. That an answer does not fit a guess is raised only if no plan was
            exact.
    """
    name = original_class(module).__name__
    check = PlanCheck(module, examples)
    search = Search(name, check, answers)
    pairs = _observe_examples(module, name, examples)
    small, first_large = pairs[0]
    starts = [(start, large) for _, large in pairs for start in find_starts(small, large)]
    if not are_a_complete_plan(answers):
        check_that_tokens_grow(name, [start for start, _ in starts], small, first_large)
    for start, large in starts:
        observed = observe(module, examples[0], start.block, start.streams)
        region = ObservedRegion(start, observed, large, segment)
        proposal = search.find_plan(region)
        if proposal is not None:
            return complete_proposal(proposal, check, answers, region)
    failures = [*search.failures]
    if are_a_complete_plan(answers):
        plan = with_answers(Plan({}, {}, (segment,)), answers, module)
        try:
            proposal = Proposal(name, plan, error=check.measure_error(plan), reasons=reasons_of(answers))
        except InexactPlanError as error:
            failure = Failure(plan, f"the plan in answers: {error}")
            if plan in search.failures:
                failure = search.failures[plan]
            failures.insert(0, failure)
        else:
            return complete_proposal(proposal, check, answers, None)
    if search.errors:
        raise search.errors[0]
    likeliest = _likeliest(failures)
    questions = write_questions([start for start, _ in starts], likeliest, check, small, first_large)
    unanswered = tuple(question for question in questions if question.partition(": ")[0] not in answers)
    return Proposal(name, questions=unanswered, guess=None if likeliest is None else likeliest.plan)


def _likeliest(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure with a way out, or else the first one; None if there is none."""
    with_way_out = [failure for failure in failures if failure.way_out is not None]
    return next(iter([*with_way_out, *failures]), None)


def _require_examples(example_inputs: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the examples. Raise ``TypeError`` unless there are one or two mappings."""
    kinds: Any = type(example_inputs).__name__
    if isinstance(example_inputs, (list, tuple)):
        if len(example_inputs) in (1, 2) and all(isinstance(example, Mapping) for example in example_inputs):
            return tuple(example_inputs)
        kinds = [type(example).__name__ for example in example_inputs]
    raise TypeError(
        f"example_inputs holds {kinds}; expected two dicts of arguments, the smaller call first. For a model that "
        "accepts one size only, pass a tuple of one dict."
    )


def _observe_examples(
    module: nn.Module, name: str, examples: Sequence[Mapping[str, Any]]
) -> list[tuple[ObservedCall, ObservedCall]]:
    """Return the pair of the two observed calls, or pairs of the only one and each imagined larger call.

    Raises:
        ValueError: The model fails with the second example.
    """
    observed = observe(module, examples[0])
    if len(examples) == 1:
        larger_calls = [*imagine_larger_calls(observed)]
        return [(observed, larger) for larger in larger_calls or [observed]]
    try:
        return [(observed, observe(module, examples[1]))]
    # The model may raise anything at a size that it does not accept.
    except Exception as error:
        raise ValueError(
            f"{name} runs with the first example, and fails with the second: {type(error).__name__}: {error} If it "
            "accepts one size only (for example because its position embedding has a fixed length), pass one example: "
            "example_inputs=(inputs,)."
        ) from error
