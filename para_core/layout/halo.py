"""Put the ends of the neighbouring ranks around what a rank holds of a sequence.

:func:`para_core.plans.exchange.add_halo` calls this module for the ``halos`` of a plan. Tests: the rows
``rows`` of tests/plans/test_exactness.py, with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from para_core.distributed.mesh import SequenceMesh
from para_core.layout.fetch import FetchPlan, Span, plan_spans, start_exchange


def fetch_halo(x: Tensor, dim: int, size: int, sizes: Sequence[int], mesh: SequenceMesh) -> Tensor:
    """Return ``x``, this rank's tokens along ``dim``, between ``size`` tokens of the previous and of the next
    rank.

    The first and the last rank of the sequence get tokens on one side only. Collective: one all-to-all inside
    each Ulysses group of several ranks, and one between the ends of the groups if there are several.
    Differentiable, in graphs as well.

    Args:
        sizes: The number of tokens of each sequence rank, each at least ``size``, which the caller checks.
            They may be symbolic.
    """
    width, has_groups = mesh.ulysses.size, mesh.ring.size > 1
    first = mesh.ring.index * width
    # With several groups, the first and the last rank of a group get the other end of their own group, to
    # pass it on to the next (previous) group. Only these ranks make the second exchange. It is complete,
    # because a ring joins the ranks of all groups that have one Ulysses index.
    plan = _plan_halo(sizes[first : first + width], size, mesh.ulysses.index, wraps=has_groups)
    before, after = start_exchange(x, dim, plan, mesh.ulysses)()
    is_first, is_last = mesh.ulysses.index == 0, mesh.ulysses.index == width - 1
    if has_groups and is_first and is_last:
        plan = _plan_ends(size, mesh, is_first=True, is_last=True)
        before, after = start_exchange(torch.cat([before, after], dim), dim, plan, mesh.ring)()
    elif has_groups and is_first:
        (before,) = start_exchange(before, dim, _plan_ends(size, mesh, is_first=True), mesh.ring)()
    elif has_groups and is_last:
        (after,) = start_exchange(after, dim, _plan_ends(size, mesh, is_last=True), mesh.ring)()
    return torch.cat([before, x, after], dim=dim)


def _plan_halo(sizes: Sequence[int], size: int, rank: int, *, wraps: bool) -> FetchPlan:
    """Return the plan that fetches the last ``size`` tokens of the rank before, and the first of the rank
    after.

    ``sizes`` are the numbers of tokens of consecutive ranks; each must be at least ``size``. They may be
    symbolic, as this function compares no sizes.

    Args:
        wraps: Whether the last rank comes before the first. Otherwise the first rank gets nothing from
            before, and the last rank nothing from after.

    >>> [tuple(span) for run in _plan_halo((3, 4, 2), 1, 1, wraps=False).runs for span in run]
    [(0, 2, 1), (2, 0, 1)]
    """
    last = len(sizes) - 1
    spans = []
    for receiver in range(len(sizes)):
        before, after = (receiver - 1) % len(sizes), (receiver + 1) % len(sizes)
        from_before = [Span(before, sizes[before] - size, size)] if receiver > 0 or wraps else []
        from_after = [Span(after, 0, size)] if receiver < last or wraps else []
        spans.append([from_before, from_after])
    return plan_spans(spans, rank)


def _plan_ends(size: int, mesh: SequenceMesh, *, is_first: bool = False, is_last: bool = False) -> FetchPlan:
    """Return the plan by which groups exchange their ends, of ``size`` tokens each.

    The first rank of each group has the last tokens of its group, and fetches those of the group before. The
    last rank has the first tokens, and fetches those of the group after. A group of one rank has both, in
    this order.
    """
    spans = []
    for group in range(mesh.ring.size):
        runs: list[list[Span]] = []
        if is_first:
            runs.append([Span(group - 1, 0, size)] if group > 0 else [])
        if is_last:
            runs.append([Span(group + 1, size * is_first, size)] if group < mesh.ring.size - 1 else [])
        spans.append(runs)
    return plan_spans(spans, mesh.ring.index)
