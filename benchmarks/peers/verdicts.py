"""From what the ranks of one attempt left behind to a word."""

from __future__ import annotations

import re
from typing import Any

# Float32 sums in another order differ by about 1e-7; a wrong weight anywhere by far more than this.
EXACT = 1e-5
# In half precision: so many times the error of one device's own attention in that precision, both against float64.
HALF_PRECISION = 2
# What a rank raises because another one is gone: the reason is there.
LOST_CONNECTION = re.compile(r"Connection (reset|closed|refused)|Socket closed", re.IGNORECASE)
# Only what names a device or a package for one: everything else that is raised is a refusal.
DEMANDS_CUDA = re.compile(r"cuda|flash_?attn is not|FlashAttention is not available|\bGPU", re.IGNORECASE)


def verdict(ranks: list[dict[str, Any] | None], tokens: int) -> dict[str, Any]:
    """The outcome of one attempt.

    Args:
        ranks: of each rank what it wrote: ``{"errors": {...}, "bounds": {...}, "positions": [...]}``, or ``{"raised":
            first line, "at": seconds}``, or ``{"died": exit code}``; None if it had written nothing when time was up.
        tokens: of the whole sequence.

    Returns:
        ``verdict``, and what it rests on: ``error`` (the worst relative error of all ranks), or ``message``.
    """
    raised = sorted((rank["at"], rank["raised"]) for rank in ranks if rank and "raised" in rank)
    own = [message for _, message in raised if not LOST_CONNECTION.search(message)]
    died = [rank["died"] for rank in ranks if rank and "died" in rank]
    if died and not own:
        return {"verdict": "crashes", "message": f"a rank's process ended with exit code {died[0]}"}
    if raised:
        message = own[0] if own else raised[0][1]
        found = {"verdict": "needs CUDA" if DEMANDS_CUDA.search(message) else "refused", "message": message}
        waiting = [number for number, rank in enumerate(ranks) if rank is None]
        return {**found, "ranks left waiting": waiting} if waiting else found
    if None in ranks:
        return {"verdict": "hangs"}
    errors = {name: max(rank["errors"][name] for rank in ranks) for name in ranks[0]["errors"]}
    found: dict[str, Any] = {"error": max(errors.values())}
    if len(errors) > 1:
        found["errors"] = errors
    if {position for rank in ranks for position in rank["positions"]} != set(range(tokens)):
        return {"verdict": "wrong", **found, "message": "some tokens were computed by no rank"}
    within = all(error <= ranks[0]["bounds"][name] for name, error in errors.items())
    return {"verdict": "exact" if within else "wrong", **found}


def best(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """The first attempt that is exact, otherwise the first: what the peer's documentation leads to."""
    return next((attempt for attempt in attempts if attempt["verdict"] == "exact"), attempts[0])
