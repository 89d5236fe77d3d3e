"""The option of attention to a share of the keys, a :class:`~para_core.attention.hooks.KeySelection`, which
``snapkv.py`` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from para_core.attention.blocks import LocalAttention
    from para_core.attention.ring_plan import RingPlan


@dataclass(frozen=True)
class KeptKeys:
    """Keep a share of the keys by SnapKV's criterion.

    Args:
        share: Share of the keys that each head keeps, 0 < share <= 1, rounded up to whole keys.
        window: Number of observed queries, >= 1.
    """

    share: float
    window: int

    @property
    def fields(self) -> tuple[float, int]:
        """The value as JSON values."""
        return self.share, self.window

    def observed(self, num_queries: int) -> list[int]:
        """Return the positions of the observed queries: the middles of ``window`` equal parts of the sequence, or all
        queries.

        >>> KeptKeys(0.5, 3).observed(12)
        [2, 6, 10]
        """
        if num_queries <= self.window:
            return list(range(num_queries))
        return [(2 * i + 1) * num_queries // (2 * self.window) for i in range(self.window)]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        plan: RingPlan,
        *,
        heads: Tensor | None,
        attn_func: LocalAttention | None,
        save: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute :func:`~para_core.attention.approximate.snapkv.sparse_attention`."""
        from para_core.attention.approximate.snapkv import sparse_attention  # It imports this module.

        return sparse_attention(self, query, key, value, mask, plan, heads=heads, attn_func=attn_func, save=save)

    def hide(self, query: Tensor, key: Tensor, mask: Tensor | None, plan: RingPlan, *, heads: Tensor | None) -> Tensor:
        """Return ``mask`` with all keys hidden that are not kept."""
        from para_core.attention.approximate.snapkv import hide, select_keys

        return hide(mask, select_keys(self, query, key, mask, plan, heads=heads))
