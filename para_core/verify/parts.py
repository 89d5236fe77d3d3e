"""Compare the parts of a tensor on several ranks with the whole tensor, and find out which part each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from para_core.layout.sequence import Segment, SequenceLayout

# Maximum number of segments in a joint sequence. More would give too many orders to try.
_MOST_SEGMENTS = 3


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = list(value.values())
    return [x for entry in value for x in tensors_in(entry)] if isinstance(value, (list, tuple)) else []


def relative_error(parts: Sequence[Tensor], whole: Tensor, segments: Sequence[Segment]) -> float | None:
    """Return ``‖parts − whole‖ / ‖whole‖`` over all ranks; infinity instead of NaN, None if the shapes do not fit.

    Args:
        parts: The tensor of each rank: a copy of ``whole``, or the rank's part of it along one dim.
        whole: The whole tensor.
        segments: The segments that were sharded or replicated. The tensor may hold several segments, concatenated in
            any order. If several orders fit, the smallest error is returned.
    """
    dim = sharded_dim([tuple(part.shape) for part in parts], tuple(whole.shape))
    if dim is None:
        return None
    if dim < 0:
        return _error([(part, whole) for part in parts])
    held = [part.shape[dim] for part in parts]
    wholes = (
        [whole.index_select(dim, at.to(whole.device)) for at in positions]
        for positions in held_positions(whole.shape[dim], held, segments)
    )
    return min((_error([*zip(parts, pieces, strict=True)]) for pieces in wholes), default=None)


def largest_error(out: Any, expected: Any) -> float:
    """Return the largest ``‖out − expected‖ / ‖expected‖`` over all tensors in both; infinity for NaN or unequal
    shapes.
    """
    errors = [relative_error([x], y, ()) for x, y in zip(tensors_in(out), tensors_in(expected), strict=True)]
    return max((float("inf") if error is None else error for error in errors), default=float("inf"))


def sharded_dim(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return the dim along which the shapes ``parts`` differ from the shape ``whole``: -1 if all are equal, None if
    several dims differ.
    """
    if any(len(part) != len(whole) for part in parts):
        return None
    dims = {dim for part in parts for dim, size in enumerate(part) if size != whole[dim]}
    return None if len(dims) > 1 else next(iter(dims), -1)


def _error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    difference = size = 0.0
    for part, whole in pairs:
        x, y = _comparable(part), _comparable(whole)
        # Do not count equal infinities as an error: logits of forbidden tokens are -inf on a single device, too.
        same = y.isinf() & (x == y)
        x, y = x.masked_fill(same, 0.0), y.masked_fill(same, 0.0)
        difference += float((x - y).norm()) ** 2
        size += float(y.norm()) ** 2
    error = difference**0.5 / max(size**0.5, 1e-30)
    return error if error == error else float("inf")


def _comparable(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x)
    # Compare in float64 on the CPU, and in float32 on other devices, because some do not support float64.
    return x.to(torch.float64 if x.dtype == torch.float64 or x.device.type == "cpu" else torch.float32)


def held_positions(total: int, held: Sequence[int], segments: Sequence[Segment]) -> Iterator[list[Tensor]]:
    """Yield each possible assignment of the ``total`` entries of a dim to ranks, as the positions that each rank holds.

    The entries are the tokens of one segment, or of several concatenated segments, possibly repeated (``[B · S, C]``).
    Two further layouts are tried: one sharded segment of all entries, and one of the sharded ``segments`` with a
    replicated segment of the remaining entries before or after it.

    Args:
        held: Number of entries on each rank.
        segments: The known segments.
    """
    ranks = len(held)
    kinds = {(x.total, x.replicated, x.balanced, x.together): x for x in segments}
    candidates = list(kinds.values())
    orders: list[tuple[Segment, ...]] = [(Segment("all", total),)]
    for length in range(1, min(len(candidates), _MOST_SEGMENTS) + 1):
        orders += permutations(candidates, length)
    for segment in candidates:
        if not segment.replicated and segment.total < total:
            rest = Segment("rest", total - segment.total, replicated=True)
            orders += [(segment, rest), (rest, segment)]
    for order in orders:
        layout = SequenceLayout(order, ranks)
        if not layout.total or total % layout.total:
            continue
        repeats = total // layout.total
        if [size * repeats for size in layout.sizes()] == list(held):
            starts = [i * layout.total for i in range(repeats)]
            yield [
                torch.cat([torch.arange(a + b, a + b + n) for a in starts for b, n in layout.runs(rank)])
                for rank in range(ranks)
            ]
