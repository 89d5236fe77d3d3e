"""Messages and questions of :func:`propose_plan` for a model for which no guess was exact."""

from __future__ import annotations

from para_core.adapters.propose.observe import ObservedCall
from para_core.adapters.propose.starts import Start


def nothing_grows(name: str, observed: ObservedCall, large: ObservedCall) -> str:
    """Return the error message for two calls in which no block receives a tensor that grows with the tokens."""
    handwritten = _handwritten_attention(name, observed)
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


def _handwritten_attention(name: str, observed: ObservedCall) -> str:
    """Return which modules compute a softmax themselves, as the end of a sentence; ``""`` if none does."""
    softmax = [f"{module or name} (over {list(shape)})" for module, shape in observed.softmax.items()]
    if not softmax:
        return ""
    return (
        f"computes a softmax itself: in {', '.join(softmax[:3])}. Handwritten attention cannot be intercepted. Switch "
        "the model to its fused attention (some call it flash), or call F.scaled_dot_product_attention there."
    )


def questions_of(begins: list[Start], failure: str, small: ObservedCall, large: ObservedCall) -> tuple[str, ...]:
    """Return questions for the user. Each begins with the name under which ``answers`` takes the answer, if it has one.

    Args:
        begins: The starts that were tried.
        failure: What was wrong with the likeliest plan.
        small, large: The two observed calls.
    """
    numbers = {
        f"{call.block_list}.*({parameter}): is it a number of tokens? FirstTokens and LastTokens shard those."
        for call, larger_call in zip(small.calls, large.calls, strict=False)
        for parameter, value in call.arguments.items()
        if call.block_list is not None and isinstance(value, int) and value != larger_call.arguments.get(parameter)
    }
    failure = (
        f"No plan that begins at {' or '.join(start.block for start in begins)} was exact. The likeliest guess failed: "
        f"{failure.rstrip('.')}. Correct it with propose_plan(..., answers=)."
    )
    handwritten = _handwritten_attention("the model", small)
    if handwritten:
        failure += f" The model also {handwritten}"
    return (*sorted(numbers), failure)
