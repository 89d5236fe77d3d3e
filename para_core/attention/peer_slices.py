"""Describe the slices of tensors ``[B, H, S, D]`` that the peers of an all-to-all send or receive.

Slices of equal size at equal distances are grouped, because one strided view covers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from para_core.distributed.cached_property import cached_property
from para_core.layout.sequence import Run


@dataclass(frozen=True)
class PeerSlices:
    """The slices of one tensor ``[B, H, S, D]`` of this rank in an all-to-all: those that the peers receive, or send.

    The slice of peer i consists of the tokens ``tokens[i]`` and the heads ``heads[i]``, both runs ``(start, count)``.
    """

    tokens: tuple[Run, ...]
    heads: tuple[Run, ...]

    @cached_property
    def output_size(self) -> tuple[int, int]:
        """The numbers of tokens and heads of the tensor that these slices form together."""
        tokens, heads = (max([sum(run) for run in runs]) for runs in (self.tokens, self.heads))
        return tokens, heads

    @cached_property
    def cover_output(self) -> bool:
        """Whether the slices cover the output without overlaps or gaps. Otherwise they must be added to zeros."""
        num_sent = sum([run[1] * other[1] for run, other in zip(self.tokens, self.heads, strict=True)])
        return num_sent == prod(self.output_size) and not self.may_overlap

    @property
    def may_overlap(self) -> bool:
        """Whether slices of several peers may contain the same heads of the same tokens."""
        return not (_are_disjoint(self.tokens) or _are_disjoint(self.heads))


def _are_disjoint(runs: Sequence[Run]) -> bool:
    ascending = sorted([run for run in runs if run[1]])
    return all(run[0] + run[1] <= following[0] for run, following in pairwise(ascending))


@dataclass(frozen=True)
class UniformPeers:
    """Consecutive peers whose slices have equal sizes and begin at equal distances.

    Args:
        number: Number of peers.
        runs: ``(first, count, step)`` for the tokens and for the heads of each tensor. The slice of peer i has
            ``count`` tokens (or heads), beginning at ``first + i · step``. ``step`` is ``count``, or 0 if all peers
            have the same tokens (or heads).
    """

    number: int
    runs: tuple[tuple[int, int, int], ...]


def group_uniform_peers(runs: Sequence[Sequence[Run]]) -> tuple[UniformPeers, ...]:
    """Split the peers into groups of consecutive peers with equal sizes and distances.

    ``runs[k][i]`` is the run ``(start, count)`` of peer i for entry k, which is the tokens or the heads of one tensor.

    >>> group_uniform_peers([[(0, 2), (2, 2), (4, 1)]])
    (UniformPeers(number=2, runs=((0, 2, 2),)), UniformPeers(number=1, runs=((4, 1, 1),)))
    """
    groups: list[UniformPeers] = []
    for of_peer in zip(*runs, strict=True):
        if groups and (steps := _steps(groups[-1], of_peer)) is not None:
            last = groups[-1]
            grown = tuple([(first, count, step) for (first, count, _), step in zip(last.runs, steps, strict=True)])
            groups[-1] = UniformPeers(last.number + 1, grown)
        else:
            groups.append(UniformPeers(1, tuple([(start, count, count) for start, count in of_peer])))
    return tuple(groups)


def _steps(group: UniformPeers, of_peer: Sequence[Run]) -> list[int] | None:
    """Return the step of each run of ``group`` if the peer with the runs ``of_peer`` joins it; None if it cannot join.

    The peer's runs must have the same counts as those of the group, and begin one step after those of its last peer. If
    the group has only one peer, its step is still open: it may become ``count`` or 0.
    """
    steps = []
    for (first, count, step), (start, number) in zip(group.runs, of_peer, strict=True):
        possible = (count, 0) if group.number == 1 else (step,)
        fitting = [distance for distance in possible if start == first + group.number * distance]
        if number != count or not fitting:
            return None
        steps.append(fitting[0])
    return steps
