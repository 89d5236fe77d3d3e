"""Questions to the user for whose model no plan was exact, and the error for one in which nothing can be
sharded.

Only ``propose.py`` calls it. A question begins with the name of the answer that it asks for and ": ", by
which answered ones are left out. Questions about blocks and samples are in ``completion.py``. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from para_core.adapters.propose.plan_check import PlanCheck
from para_core.adapters.propose.proposal import expression_of
from para_core.adapters.propose.records import ObservedCall, ObservedSoftmax
from para_core.adapters.propose.search import Failure
from para_core.adapters.propose.start import Start
from para_core.plans.plan import Plan


def check_that_tokens_grow(
    name: str, starts: Sequence[Start], small: ObservedCall, large: ObservedCall
) -> None:
    """Raise ``ValueError`` if there are no ``starts``: no block receives a tensor that grows with the tokens.

    Args:
        name: Name of the model's class.
        starts: The modules at whose inputs tokens may be sharded.
        small, large: The calls.
    """
    if starts:
        return
    handwritten = _describe_handwritten(name, _first_of_modules(small.softmaxes))
    if not small.attention:
        if handwritten:
            raise ValueError(f"{name} called no scaled_dot_product_attention, but {handwritten}")
        raise ValueError(
            f"{name} called no scaled_dot_product_attention. Switch its attention to a native backend."
        )
    lists = sorted(small.list_names())
    queries = sorted({attention.queries for attention in small.attention})
    larger_queries = sorted({attention.queries for attention in large.attention})
    if queries == larger_queries:
        way_out = "Pass two calls that differ in the number of image tokens."
        if handwritten:
            way_out = f"It also {handwritten}"
        raise ValueError(
            f"no stream of tokens of {name}'s module lists {lists} is longer in the second call than in the first, in "
            f"one dim: its attention has {queries} queries in both. {way_out}"
        )
    modules = sorted({attention.name or name for attention in small.attention})
    raise ValueError(
        f"attention of {name} has {queries} queries in the first call and {larger_queries} in the second (in "
        f"{', '.join(modules[:3])}), but no block of its module lists {lists}, and no module that contains them, "
        "receives a tensor [B, S, C] that grows in one dim. State where tokens are sharded and gathered: "
        "answers={'module(parameter)': Split(dim, segment=...), 'module': Gather(dim, ...)}."
    )


def _first_of_modules(softmaxes: Sequence[ObservedSoftmax]) -> list[ObservedSoftmax]:
    """Return the first softmax of each module, in the order of the modules' last ones."""
    first = {softmax.name: softmax for softmax in reversed(softmaxes)}
    return [*reversed(first.values())]


def _describe_handwritten(name: str, softmaxes: Sequence[ObservedSoftmax]) -> str:
    """Return which modules compute a softmax themselves, as the end of a sentence; ``""`` if none does."""
    if not softmaxes:
        return ""
    modules = [f"{softmax.name or name} (over {list(softmax.shape)})" for softmax in softmaxes]
    return (
        f"computes a softmax itself: in {', '.join(modules[:3])}. Handwritten attention cannot be intercepted. Switch "
        "the model to its fused attention (some call it flash), or call F.scaled_dot_product_attention there."
    )


def write_questions(
    starts: Sequence[Start],
    likeliest: Failure | None,
    check: PlanCheck,
    small: ObservedCall,
    large: ObservedCall,
) -> tuple[str, ...]:
    """Return questions for the user. Each begins with the name under which ``answers`` takes the answer, if
    it has one.

    Args:
        starts: The starts that were tried.
        likeliest: The likeliest plan; None if no plan fits the observed lengths.
        check: Checks plans.
        small, large: The calls.
    """
    no_plan = f"No plan that begins at {' or '.join(start.block for start in starts)} was exact."
    numbers = _ask_about_numbers(small, large)
    if likeliest is None:
        return (*numbers, f"{no_plan} {_explain_lengths(starts)}")
    parts = [
        no_plan,
        f"The likeliest guess failed: {likeliest.reason.rstrip('.')}.",
        _locate(check, likeliest),
    ]
    if likeliest.way_out is not None:
        parts.append(_describe_way_out(likeliest.plan, likeliest.way_out))
    parts.append("Correct it with propose_plan(..., answers=).")
    if likeliest.region is not None:
        handwritten = _describe_handwritten("the model", likeliest.region.handwritten_softmaxes())
        if handwritten:
            parts.append(f"The model also {handwritten}")
    return (*numbers, " ".join(parts))


def _ask_about_numbers(small: ObservedCall, large: ObservedCall) -> list[str]:
    """Return a question for each int that blocks get, and that differs between the calls."""
    questions = set()
    for call, larger_call in zip(small.calls, large.calls, strict=False):
        if call.block_list is None:
            continue
        for parameter, value in call.arguments.items():
            larger = larger_call.arguments.get(parameter)
            # As rules.py guesses. A flag is a bool, and a parameter that only one call has is no number of
            # tokens.
            if type(value) is int and type(larger) is int and value != larger:
                questions.add(
                    f"{call.block_list}.*({parameter}): is it a number of tokens? FirstTokens and LastTokens shard "
                    "those."
                )
    return sorted(questions)


def _explain_lengths(starts: Sequence[Start]) -> str:
    """Return, as sentences, why no plan fits the observed lengths."""
    reason = (
        "Attention has lengths that are not those of the tokens. State the plan: propose_plan(..., answers=)."
    )
    inner = next((start for start in starts if start.dim > 1), None)
    if inner is None:
        return reason
    return (
        f"{reason} In {inner.streams[0]} of {inner.block} dim {inner.dim} grows. If attention flattens it with dims "
        "before it, as in [B, T, H, W, C], pass examples that differ in the first of these, the frames."
    )


def _locate(check: PlanCheck, failure: Failure) -> str:
    """Return, as sentences, in which module the plan of ``failure`` first differs, or failed."""
    lengths = [] if failure.region is None else [failure.region.start.entries]
    difference = check.find_difference(failure.plan, *lengths)
    module = f"the model itself ({difference.kind})"
    if difference.module:
        module = f"{difference.module} ({difference.kind})"
    page = (
        "If it computes positions, lengths or a mask of all tokens, see 'Where positions and lengths come from' in "
        "docs/own_model.md."
    )
    # The error of a rank, which follows its number, is a part of the reason of the failure.
    rank, _, error = difference.reason.partition(": ")
    if rank.startswith("rank ") and error in failure.reason:
        return f"It failed in {module}. {page}"
    size = ""
    if difference.error is not None:
        size = f" (by {difference.error:.1e})"
    return f"The first difference is in {module}: {difference.reason}{size}. {page}"


def _describe_way_out(plan: Plan, way_out: Plan) -> str:
    """Return, as a sentence, with which answers ``plan`` becomes the plan ``way_out``."""
    answers = [
        f'"{module}({key})": {expression_of(rule)}'
        for module, rules in way_out.inner.items()
        for key, rule in rules.items()
        if module not in plan.inner
    ]
    return f"It is exact with answers={{{', '.join(answers)}}}, but then every rank computes that for all tokens."
