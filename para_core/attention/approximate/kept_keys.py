"""Which share of the keys is attended to: the value. How they are found and attended to stands in ``snapkv.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptKeys:
    """``share`` of the keys, 0 < share <= 1, rounded up to whole keys; ``window`` observed queries, >= 1."""

    share: float
    window: int

    def observed(self, num_queries: int) -> list[int]:
        """Positions of the observed queries: the middles of ``window`` equal parts of the sequence, or all queries.

        >>> KeptKeys(0.5, 3).observed(12)
        [2, 6, 10]
        """
        if num_queries <= self.window:
            return list(range(num_queries))
        return [(2 * i + 1) * num_queries // (2 * self.window) for i in range(self.window)]
