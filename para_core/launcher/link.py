"""The connection of a function that runs on a rank to the caller of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _ignore(value: Any) -> None:
    pass


def _is_never_cancelled() -> bool:
    return False


@dataclass(frozen=True)
class CallerLink:
    """The connection of a call that runs on a rank to its caller. By default nobody listens or cancels.

    Args:
        push: Sends a value to the caller's listener. On all ranks but the first it does nothing.
        cancelled: Returns whether the caller has cancelled the call. Ranks may learn it at different steps,
            so they must agree on the answer of the first rank before they stop.
    """

    push: Callable[[Any], None] = _ignore
    cancelled: Callable[[], bool] = _is_never_cancelled


NO_CALLER = CallerLink()
