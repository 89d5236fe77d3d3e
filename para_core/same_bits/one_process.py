"""The sizes that one process would have, for the tensors of a rank inside a call of a model with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from para_core.layout.sequence import Run, Segment, SequenceLayout
from para_core.plans.current_call import ranks_sharing_samples, segments_under_way

# Elements in a vector of a CPU's registers, at least.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """The place of a rank's part of a dim in that dim of one process.

    Args:
        total: The size of the dim in one process.
        runs: The positions of the rank's part, as runs ``(start, length)`` in the order of its tensor.
    """

    total: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class OneProcess:
    """The call of one process, whose part this rank computes.

    Args:
        segments: The sequences of the call so far, in the order of the joint sequence.
        rank, ranks: This rank and the number of ranks that share tokens.
        ulysses: The number of ranks that share the heads of attention.
        batch_index, batch_size: The part of the samples that this rank has; ``(0, 1)`` if it has all.
    """

    segments: tuple[Segment, ...] = ()
    rank: int = 0
    ranks: int = 1
    batch_index: int = 0
    batch_size: int = 1
    ulysses: int = 1

    @property
    def is_this_process(self) -> bool:
        """Whether this rank has all tokens and all samples."""
        return self.batch_size == 1 and all(segment.replicated for segment in self.segments)

    @cached_property
    def _places(self) -> dict[int, Place]:
        """The place of each number of tokens that neighbouring segments have on this rank."""
        places: dict[int, Place] = {}
        for first in range(len(self.segments)):
            for end in range(first + 1, len(self.segments) + 1):
                layout = SequenceLayout(self.segments[first:end], self.ranks)
                size = sum(segment.size(self.rank, self.ranks) for segment in layout.segments)
                total = sum(segment.total for segment in layout.segments)
                # Of two sequences with as many tokens on this rank, the shorter one is as good, unless it has
                # few rows.
                if size not in places or places[size].total < total:
                    places[size] = Place(total, tuple(layout.runs(self.rank)))
        return places

    def place_of_tokens(self, x: Tensor) -> tuple[int, Place] | None:
        """Return the dim of ``x`` that has this rank's tokens, and their place in one process; None if no dim
        has.

        The last dim has features. The first has samples, unless there are two dims.
        """
        if self.ranks == 1:
            return None
        for dim in range(x.ndim - 2, 0 if x.ndim > 2 else -1, -1):
            place = self._places.get(x.shape[dim])
            if place is not None:
                return dim, place
        return None


def one_process_of(module: nn.Module) -> OneProcess:
    """Return what one process would compute in place of the current call of ``module``."""
    current = segments_under_way(module)
    batch = ranks_sharing_samples(module)
    index, size = 0, 1
    if batch is not None:
        index, size = batch.index, batch.size
    if current is None:
        return OneProcess(batch_index=index, batch_size=size)
    mesh, segments = current
    return OneProcess(segments, mesh.rank, mesh.ranks, index, size, mesh.ulysses.size)


def resize(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return zeros of the given sizes, with the type of ``x``, its order of dims in memory, and its
    contiguity.

    Kernels are chosen by both: a linear layer with a bias rounds once if its input is contiguous, and twice
    else.
    """
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    in_memory = [sizes[dim] for dim in order]
    if _is_dense(x, order, sizes):
        zeros = x.new_zeros(in_memory)
    else:
        # More elements in each row keep the tensor from being contiguous.
        gap = _gap_between_rows(x, order)
        zeros = x.new_zeros([*in_memory[:-1], in_memory[-1] + gap]).narrow(-1, 0, in_memory[-1])
    zeros = zeros.permute([order.index(dim) for dim in range(x.ndim)])
    # Kernels read the stride of a dim of one element, too, which a view may have from another tensor. If it is
    # that of the dim around it, they take both dims for one, and the zeros have equal strides there as well.
    new_strides = [*zeros.stride()]
    stride = 1
    for index in reversed(range(x.ndim)):
        dim = order[index]
        is_one_dim = index > 0 and strides[order[index - 1]] == strides[dim]
        if x.shape[dim] == sizes[dim] == 1 and strides[dim] != stride and not is_one_dim:
            new_strides[dim] = strides[dim]
        stride *= x.shape[dim]
    return zeros.as_strided(zeros.shape, new_strides)


def _gap_between_rows(x: Tensor, order: Sequence[int]) -> int:
    """Return a number of elements, at least one, with which rows of the innermost dim are aligned as those of
    ``x``.

    MKL adds up in another order if rows do not begin at a multiple of its vectors, which have 64 bytes at
    most.
    """
    if x.ndim < 2:
        return 1
    return (x.stride(order[-2]) - x.shape[order[-1]]) % _ALIGNMENT or _ALIGNMENT


def is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` follow each other in memory, in any order of dims."""
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    return _is_dense(x, order, x.shape)


def _is_dense(x: Tensor, order: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the elements of ``x`` follow each other in memory, and would if it had these sizes.

    A dim of size 1, such as that of a single token, has the stride of the tensor that it was cut from.
    """
    stride = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and x.stride(dim) != stride:
            return False
        stride *= x.shape[dim]
    return True


def put_at_place(
    x: Tensor, into: Tensor, one_process: OneProcess, tokens: tuple[int, Place] | None, samples: bool
) -> None:
    """Copy this rank's part ``x`` to its place in ``into``, which has the sizes of one process."""
    for target, part in _pair_parts(into, x, one_process, tokens, samples):
        target.copy_(part)


def take_from_place(
    y: Tensor, one_process: OneProcess, tokens: tuple[int, Place] | None, samples: bool
) -> Tensor:
    """Return this rank's part of a result ``y`` with the sizes of one process."""
    if samples:
        size = y.shape[0] // one_process.batch_size
        y = y.narrow(0, one_process.batch_index * size, size)
    if tokens is None:
        return y
    dim, place = tokens
    return torch.cat([y.narrow(dim, start, length) for start, length in place.runs], dim)


def _pair_parts(
    whole: Tensor, x: Tensor, one_process: OneProcess, tokens: tuple[int, Place] | None, samples: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return views of ``whole``, each with the part of this rank's ``x`` that belongs there."""
    if samples:
        size = whole.shape[0] // one_process.batch_size
        whole = whole.narrow(0, one_process.batch_index * size, size)
    if tokens is None:
        return [(whole, x)]
    dim, place = tokens
    parts = x.split([length for _, length in place.runs], dim)
    return [
        (whole.narrow(dim, start, length), part)
        for (start, length), part in zip(place.runs, parts, strict=True)
    ]
