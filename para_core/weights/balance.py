"""The split of blocks into pipeline stages. Imports no torch, so that the planner starts at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split_by_cost(costs: Sequence[float], num_stages: int) -> list[range]:
    """Return the range of block indices of each stage, for stages whose largest cost is minimal.

    Each stage gets at least one block, and of several optimal splits earlier stages get more. Raise
    ``ValueError`` if there are fewer blocks than stages.

    >>> split_by_cost([2, 2, 1, 1, 1, 1], 2)
    [range(0, 2), range(2, 6)]
    """
    if num_stages > len(costs):
        raise ValueError(
            f"the model has {len(costs)} blocks, too few for {num_stages} stages. Give fewer ranks to "
            f"'pipe': max_pipe_dim_size={len(costs)} at most."
        )
    before = [0.0, *accumulate(costs)]
    # starts[n][end] describes the best split of the first `end` blocks into n + 1 stages: (cost of the
    # slowest stage, index of the first block of the last stage).
    best = [(total, 0) for total in before]
    starts = [best]
    for stage in range(1, num_stages):
        best = [
            min(
                ((max(best[start][0], before[end] - before[start]), start) for start in range(stage, end)),
                key=lambda split: (split[0], -split[1]),
                default=(float("inf"), 0),
            )
            for end in range(len(before))
        ]
        starts.append(best)
    ends = [len(costs)]
    for split in reversed(starts[1:]):
        ends.append(split[ends[-1]][1])
    return [range(start, end) for start, end in zip([0, *ends[:0:-1]], ends[::-1], strict=True)]
