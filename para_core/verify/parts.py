"""Find which entries of a whole tensor each rank holds, and compare its part with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.layout import Segment, SequenceLayout

# Of a joint sequence. More would be tried in too many orders.
_MOST_SEGMENTS = 3


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = list(value.values())
    return [x for one in value for x in tensors_in(one)] if isinstance(value, (list, tuple)) else []


def relative_error(parts: Sequence[Tensor], whole: Tensor, segments: Sequence[Segment]) -> float | None:
    """Return ``‖parts − whole‖ / ‖whole‖`` over all ranks; infinity for NaN, None if the shapes do not fit each other.

    Args:
        parts: each rank's tensor: all of ``whole``, or its part along one dim.
        segments: the sequences that are known to be sharded or replicated. If they could be concatenated in several
            orders, the order with the smallest error counts.
    """
    dim = _sharded_dim([tuple(part.shape) for part in parts], tuple(whole.shape))
    if dim is None:
        return None
    if dim < 0:
        return _error([(part, whole) for part in parts])
    held = [part.shape[dim] for part in parts]
    errors = [
        _error(
            [(part, whole.index_select(dim, at.to(whole.device))) for part, at in zip(parts, positions, strict=True)]
        )
        for positions in held_positions(whole.shape[dim], held, segments)
    ]
    return min(errors, default=None)


def _sharded_dim(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return the dim in which parts differ from the whole; -1 if there is none, None if there are several."""
    if any(len(part) != len(whole) for part in parts):
        return None
    dims = {dim for part in parts for dim, size in enumerate(part) if size != whole[dim]}
    return None if len(dims) > 1 else next(iter(dims), -1)


def _error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    difference = size = 0.0
    for part, whole in pairs:
        x, y = _comparable(part), _comparable(whole)
        # Logits of forbidden tokens are -inf on one device, too.
        same = y.isinf() & (x == y)
        x, y = x.masked_fill(same, 0.0), y.masked_fill(same, 0.0)
        difference += float((x - y).norm()) ** 2
        size += float(y.norm()) ** 2
    error = difference**0.5 / max(size**0.5, 1e-30)
    return error if error == error else float("inf")


def _comparable(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x)
    # Not every device has float64.
    return x.to(torch.float64 if x.dtype == torch.float64 or x.device.type == "cpu" else torch.float32)


def held_positions(total: int, held: Sequence[int], segments: Sequence[Segment]) -> Iterator[list[Tensor]]:
    """Ways in which the ranks may hold ``held`` entries of ``total``: each a list with the positions of every rank.

    Entries are the tokens of one or several segments, once or several times one after the other (``[B · S, C]``). A
    segment that nobody declared may be all of it, sharded, or what is left beside another one, on every rank.
    """
    ranks = len(held)
    kinds = {(one.total, one.replicated, one.balanced, one.together): one for one in segments}
    known = list(kinds.values())
    orders: list[tuple[Segment, ...]] = [(Segment("all", total),)]
    for length in range(1, min(len(known), _MOST_SEGMENTS) + 1):
        orders += permutations(known, length)
    for one in known:
        if not one.replicated and one.total < total:
            rest = Segment("rest", total - one.total, replicated=True)
            orders += [(one, rest), (rest, one)]
    for order in orders:
        layout = SequenceLayout(order, ranks)
        if not layout.total or total % layout.total:
            continue
        repeats = total // layout.total
        if [size * repeats for size in layout.sizes()] == list(held):
            yield [_positions(layout, rank, repeats) for rank in range(ranks)]


def _positions(layout: SequenceLayout, rank: int, repeats: int) -> Tensor:
    once = torch.cat([torch.arange(start, start + length) for start, length in layout.runs(rank)])
    return torch.cat([once + layout.total * i for i in range(repeats)])
