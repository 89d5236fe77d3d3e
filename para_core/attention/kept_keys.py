"""Attention in which each head attends to a share of the keys. Not exact. Imports no torch.

:mod:`~para_core.attention.approximate.snapkv` computes it, and is imported when it is first needed.

:class:`~para_core.modes.kept_keys.SparseKVAttnMode` and AttentionSchedule set the option. Tests:
tests/attention/approximate/test_kept_keys.py and tests/adapters/test_schedule_of_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from importlib import import_module
from math import ceil
from numbers import Real
from typing import TYPE_CHECKING, Any

from para_core.attention.option import AttentionOption

if TYPE_CHECKING:
    from torch import Tensor

    from para_core.attention.attention_plan import AttentionPlan


@dataclass(frozen=True)
class KeptKeys(AttentionOption):
    """Attention in which each head attends only to a share of the keys. **Not exact.** See
    :class:`SparseKVAttnMode`.

    Args:
        share (`float`): Share of the keys that each head keeps, 0 < share <= 1. The number of keys is rounded
            up.
        window (`int`, *optional*, defaults to `64`): Number of queries whose attention weights decide which
            keys are kept.

    Raises:
        ValueError: If ``share`` or ``window`` is no such number.
    """

    share: float
    window: int = 64

    option = "kept_keys"
    # The observed queries are chosen by their positions in the sequence.
    by_position = True
    by_step = True
    # The choice of keys depends on queries of all ranks, also if every rank holds all keys.
    needs_all_ranks = True

    def __post_init__(self) -> None:
        share: Any = self.share  # For mypy, which takes no float for a Real.
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
            raise ValueError(
                f"share is {self.share!r}; expected the share of the keys to keep, 0 < share <= 1."
            )
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}; expected a positive number of observed queries.")
        # Equal options must have equal JSON, and the one of 1 is not the one of 1.0. A number of NumPy has
        # none.
        object.__setattr__(self, "share", float(self.share))

    @property
    def fields(self) -> tuple[float, int]:
        """The arguments of the constructor, for the JSON form of the options."""
        return self.share, self.window

    def choose_observed(self, num_queries: int) -> list[int]:
        """Return the positions of the queries whose attention weights decide which keys are kept.

        They are the middles of ``window`` equal parts of the sequence; all positions if ``num_queries <=
        window``.

        >>> KeptKeys(0.5, 3).choose_observed(12)
        [2, 6, 10]
        """
        if num_queries <= self.window:
            return list(range(num_queries))
        return [(2 * i + 1) * num_queries // (2 * self.window) for i in range(self.window)]

    def count_kept(self, num_keys: int) -> int:
        """Return how many of ``num_keys`` keys each head keeps: their ``share``, rounded up.

        >>> KeptKeys(0.55).count_kept(100)
        55
        """
        # A product of floats may be too large: 0.55 * 100 is 55.000000000000007.
        return ceil(Decimal(repr(self.share)) * num_keys)

    @property
    def attend(self) -> Callable[..., tuple[Tensor, Tensor]]:  # type: ignore[override]
        """The function that computes attention to the kept keys, in place of ``attend_all``."""
        return partial(_import_snapkv().attend_to_kept_keys, self)

    def mask_of_gradient(
        self, plan: AttentionPlan, query: Tensor, key: Tensor, mask: Tensor | None, heads: Tensor | None
    ) -> Tensor | None:
        """Return ``mask`` with the keys hidden that are not kept. Collective."""
        snapkv = _import_snapkv()
        is_kept = snapkv.select_keys(self, query, key, mask, plan.ring, heads=heads)
        hidden: Tensor = snapkv.hide(mask, is_kept)
        return hidden


def _import_snapkv() -> Any:
    """Return the module that computes. Exact attention does not load it."""
    return import_module("para_core.attention.approximate.snapkv")
