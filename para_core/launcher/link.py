"""The caller, as a function that runs on a rank sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _ignore(value: Any) -> None:
    pass


@dataclass(frozen=True)
class Link:
    """Connection of a call that runs on a rank to its caller."""

    push: Callable[[Any], None] = (
        _ignore  # sends a value to the caller's listener; on ranks but the first it does not
    )
    # Returns whether the caller has cancelled the call. Ranks may learn it at different steps: the first one
    # decides.
    cancelled: Callable[[], bool] = lambda: False


NO_CALLER = Link()  # of a call that nobody listens to or cancels
