"""The connection of a function that runs on a rank, such as those of ``fleet/rank.py``, to the caller of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallerLink:
    """The connection of a call that runs on a rank to its caller. By default nobody listens or cancels.

    Args:
        push: Sends a value to the caller's listener. On all ranks but the first it does nothing.
        cancelled: Returns whether the caller has cancelled the call. Ranks may learn it at different steps,
            so they must agree on the answer of the first rank before they stop.
    """

    push: Callable[[Any], None] = lambda value: None
    cancelled: Callable[[], bool] = lambda: False


NO_CALLER = CallerLink()
