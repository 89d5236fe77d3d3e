"""Compare the parts of a tensor on several ranks with the full tensor, and find out which part each rank
holds.

``check_parallel`` and ``propose_plan`` compare parts and outputs with it, ``verify=True`` outputs, and
:mod:`.difference` digests. The tolerances are in :mod:`.tolerances`. Tests:
tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from para_core.dataclass_fields import leaves_of
from para_core.layout.sequence import Segment, SequenceLayout

# Maximum number of segments in a joint sequence. More would give too many orders to try.
_MOST_SEGMENTS = 3
# Numbers from this size on are fillers, such as the -1e9 in logits of forbidden tokens. A smaller filler,
# such as -1e4, cannot be told from an activation.
_FILLER = 1e8


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and dataclasses, in the order of their entries and fields.

    Callers pair the tensors of two values by this order, so two dicts must have their keys in the same order.
    """
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [x for entry in value for x in tensors_in(entry)]


def results_in(output: Any) -> list[Tensor]:
    """Return what is compared of an output: the tensors as in :func:`tensors_in`, and numbers, such as that
    of all tokens, as tensors without dims.
    """
    numbers = [
        torch.tensor(float(leaf), dtype=torch.float64)
        for leaf in leaves_of(output)
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]
    return [*tensors_in(output), *numbers]


def relative_error(parts: Sequence[Tensor], full: Tensor, segments: Sequence[Segment]) -> float | None:
    """Return ``‖parts − full‖ / ‖full‖`` over all ranks.

    None if no part of ``full`` has the shapes of ``parts``, so that nothing can be compared; infinity if the
    numbers were compared, and the result is NaN or a norm overflows.

    Args:
        parts: The tensor of each rank: a copy of ``full``, or the rank's part of it along one dim.
        full: The full tensor.
        segments: The segments that were sharded or replicated. The tensor may hold several segments,
            concatenated in any order. If several orders fit, the smallest error is returned.
    """
    if any(part.ndim != full.ndim for part in parts):
        return None
    dims = differing_dims([part.shape for part in parts], full.shape)
    if not dims:
        return _error([(part, full) for part in parts])
    if len(dims) > 1:
        return None
    (dim,) = dims
    sizes = [part.shape[dim] for part in parts]
    errors = []
    for positions in possible_positions(full.shape[dim], sizes, segments):
        pieces = [full.index_select(dim, of_rank.to(full.device)) for of_rank in positions]
        errors.append(_error([*zip(parts, pieces, strict=True)]))
    return min(errors, default=None)


def largest_error(out: Any, expected: Any) -> float:
    """Return the largest ``‖out − expected‖ / ‖expected‖`` of the tensors and numbers in both, paired by
    :func:`results_in`; infinity for NaN, other shapes or another number of tensors.

    >>> largest_error(torch.ones(1), (torch.ones(1), torch.ones(1)))
    inf
    """
    outs, full = results_in(out), results_in(expected)
    if len(outs) != len(full):
        return math.inf
    largest = -math.inf
    for x, y in zip(outs, full, strict=True):
        error = relative_error([x], y, ())
        if error is None:
            return math.inf
        largest = max(largest, error)
    if largest < 0:  # There is no tensor to compare.
        return math.inf
    return largest


def differing_dims(parts: Sequence[Sequence[int]], full: Sequence[int]) -> list[int]:
    """Return the dims in which a shape of ``parts`` differs from the shape ``full``.

    All have the same length.
    """
    return [dim for dim, size in enumerate(full) if any(part[dim] != size for part in parts)]


def _error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return ``‖x − y‖ / ‖y‖`` over all pairs ``(x, y)``; infinity instead of NaN, or if a norm overflows."""
    difference: float = 0.0
    size: float = 0.0
    for part, full in pairs:
        x, y = _to_compare(part), _to_compare(full)
        # Leave out equal infinities and equal fillers: logits of forbidden tokens have them on a single
        # device, too, and next to them no other number would count. In float16 a filler is less than _FILLER.
        limit = math.inf
        if full.is_floating_point():
            limit = min(_FILLER, torch.finfo(full.dtype).max / 2)
        same = (y.abs() >= limit) & (x == y)
        x, y = x.masked_fill(same, 0.0), y.masked_fill(same, 0.0)
        difference = math.hypot(difference, float((x - y).norm()))
        size = math.hypot(size, float(y.norm()))
    # By an infinite size every difference would be an error of 0.
    if not math.isfinite(size) or math.isnan(difference):
        return math.inf
    return difference / max(size, 1e-30)


def _to_compare(x: Tensor) -> Tensor:
    """Return ``x`` in float64 on the CPU, and in float32 on other devices, some of which do not support
    float64. There integers from 2²⁴ on may become equal.
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype == torch.float64 or x.device.type == "cpu":
        return x.to(torch.float64)
    return x.to(torch.float32)


def possible_positions(
    total: int, sizes: Sequence[int], segments: Sequence[Segment]
) -> Iterator[list[Tensor]]:
    """Yield each possible assignment of the ``total`` entries of a dim to ranks, as the positions on each
    rank.

    The entries are the tokens of one segment, or of several concatenated segments, possibly repeated
    (``[B · S, C]``). Two further layouts are tried: one sharded segment of all entries, and one of the
    sharded ``segments`` with a replicated segment of the remaining entries before or after it.

    Args:
        total: Number of entries.
        sizes: Number of entries on each rank.
        segments: The known segments.
    """
    ranks = len(sizes)
    for order in _orders(total, segments):
        layout = SequenceLayout(order, ranks)
        if not layout.total or total % layout.total:
            continue
        repeats = total // layout.total
        if [size * repeats for size in layout.sizes()] == list(sizes):
            yield [_positions_on_rank(layout, rank, repeats) for rank in range(ranks)]


def _orders(total: int, segments: Sequence[Segment]) -> Iterator[tuple[Segment, ...]]:
    """Yield the sequences of segments that ``total`` entries may consist of, or a part of the entries that
    repeats.
    """
    yield (Segment("all", total),)
    # Segments with equal sizes and options are sharded in the same way. So two orders that differ only in the
    # places of equal segments are the same, and one of them is tried. A single order may contain several such
    # segments.
    kinds = [(x.total, x.replicated, x.balanced, x.together) for x in segments]
    for length in range(1, min(len(segments), _MOST_SEGMENTS) + 1):
        orders = {
            tuple([kinds[index] for index in order]): tuple([segments[index] for index in order])
            for order in permutations(range(len(segments)), length)
        }
        yield from orders.values()
    for segment in dict(zip(kinds, segments, strict=True)).values():
        if not segment.replicated and segment.total < total:
            rest = Segment("rest", total - segment.total, replicated=True)
            yield (segment, rest)
            yield (rest, segment)


def _positions_on_rank(layout: SequenceLayout, rank: int, repeats: int) -> Tensor:
    """Return the positions that ``rank`` holds of a dim that consists of ``repeats`` sequences of ``layout``."""
    starts = [i * layout.total for i in range(repeats)]
    runs = [(start + first, length) for start in starts for first, length in layout.runs(rank)]
    return torch.cat([torch.arange(first, first + length) for first, length in runs])
