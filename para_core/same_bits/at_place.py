"""Compute a function of one row for a rank's rows at their place in zeros of one process's sizes.

Libraries choose kernels by sizes and by the layout in memory. The same function of the same rows at the same
place in a tensor of the same sizes has the bits of one process, whatever the other rows are.

These are the tools of :mod:`.mode` and :mod:`.row_check` for models with a plan; :mod:`.placed_rows` does the
same for rows of an image. Tests: tests/same_bits/test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.same_bits.one_process import OneProcess, Tokens

# A multiple of the elements, of any type, in a vector of a CPU's registers.
_ALIGNMENT = 64

# A function, with what its bits may depend on.
CallKind = tuple[Any, ...]


class TorchCall(NamedTuple):
    """A call of a function of torch: its first argument, a tensor, and the others."""

    func: Callable[..., Any]
    x: Tensor
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def on(self, x: Tensor) -> Any:
        """Return the function of ``x`` in place of its tensor."""
        return self.func(x, *self.args, **self.kwargs)

    @property
    def weight(self) -> Tensor | None:
        """The weight of a linear product; None for another function."""
        if self.func is not F.linear:
            return None
        weight: Tensor = self.args[0] if self.args else self.kwargs["weight"]
        return weight

    @property
    def kind(self) -> CallKind:
        """The function, and what the bits of its result may depend on, besides the elements of the tensors."""
        # Another dim or stride of a convolution is another function.
        others = [*self.args, *[value for _, value in sorted(self.kwargs.items())]]
        x, names = self.x, tuple(sorted(self.kwargs))
        return (self.func, x.shape, x.stride(), x.dtype, names, *map(_shape_or_text, others))


def _shape_or_text(argument: Any) -> Any:
    """Return the shape of a tensor, or the text of another argument."""
    if isinstance(argument, Tensor):
        return argument.shape
    return repr(argument)


def resize(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return zeros of the given sizes, with the type of ``x``, its order of dims in memory, and its
    contiguity.

    Kernels are chosen by both: a linear layer with a bias rounds once if its input is contiguous, and twice
    else. A function of a view, such as half of the channels, computes those elements in one loop that follow
    each other in memory, and the last few of each loop in another way: the zeros are such a view, too.
    """
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    in_memory = [sizes[dim] for dim in order]
    if _is_dense(x, order, sizes):
        zeros = x.new_zeros(in_memory)
    elif (strides_of_view := _strides_of_view(x, order, sizes)) is not None:
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides_of_view, strict=True))
        return x.new_zeros(last + 1).as_strided(sizes, strides_of_view)
    else:
        # More elements in each row keep the tensor from being contiguous.
        gap = _gap_between_rows(x, order)
        zeros = x.new_zeros([*in_memory[:-1], in_memory[-1] + gap]).narrow(-1, 0, in_memory[-1])
    zeros = zeros.permute([order.index(dim) for dim in range(x.ndim)])
    # Kernels read the stride of a dim of one element, too, which a view may have from another tensor. If it
    # is that of the dim around it, they take both dims for one, and the zeros have equal strides there as
    # well.
    new_strides = [*zeros.stride()]
    stride = 1
    for index in reversed(range(x.ndim)):
        dim = order[index]
        is_one_dim = index > 0 and strides[order[index - 1]] == strides[dim]
        if x.shape[dim] == sizes[dim] == 1 and strides[dim] != stride and not is_one_dim:
            new_strides[dim] = strides[dim]
        stride *= x.shape[dim]
    return zeros.as_strided(zeros.shape, new_strides)


def _strides_of_view(x: Tensor, order: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Return the strides that ``x``, a view of some channels for example, has if the tensor that it is a view
    of has the given sizes; None if they are unknown.

    A stride grows with the dims inside of it whose sizes change. It must be a multiple of what they span,
    which it is not in a view of some of the tokens.
    """
    strides = [*x.stride()]
    # The elements that the last changed dim and those inside of it span, in x and in the result.
    span, new_span = 1, 1
    end = 1
    for dim in reversed(order):
        stride, size = strides[dim], x.shape[dim]
        strides[dim] = stride // span * new_span
        if size == sizes[dim] == 1:
            continue
        # With a stride before the end of the dims inside, as in an expanded tensor, elements share memory.
        if size == 0 or sizes[dim] == 0 or stride % span or strides[dim] < end:
            return None
        end = strides[dim] * sizes[dim]
        if size != sizes[dim]:
            span, new_span = stride * size, end
    return strides


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
    return _is_dense(x, sorted(range(x.ndim), key=x.stride().__getitem__, reverse=True), x.shape)


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


def put_at_place(x: Tensor, into: Tensor, one_process: OneProcess, tokens: Tokens, samples: bool) -> None:
    """Copy this rank's part ``x`` to its place in ``into``, which has the sizes of one process.

    ``samples`` says whether dim 0 of ``into`` holds the samples of all ranks along ``batch``; if not, it is
    copied as a whole.
    """
    for target, part in _pair_parts(into, x, one_process, tokens, samples):
        target.copy_(part)


def take_from_place(y: Tensor, one_process: OneProcess, tokens: Tokens, samples: bool) -> Tensor:
    """Return this rank's part of a result ``y`` with the sizes of one process. ``samples`` is as in
    :func:`put_at_place`.
    """
    if samples:
        size = y.shape[0] // one_process.batch_size
        y = y.narrow(0, one_process.batch_index * size, size)
    if tokens is None:
        return y
    dim, place = tokens
    return torch.cat([y.narrow(dim, start, length) for start, length in place.runs], dim)


def _pair_parts(
    whole: Tensor, x: Tensor, one_process: OneProcess, tokens: Tokens, samples: bool
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


def has_samples(x: Tensor, one_process: OneProcess, tokens: Tokens) -> bool:
    """Whether dim 0 of ``x`` has this rank's samples, and other ranks have the rest.

    A tensor of one dim is taken for features: it has no rows, like a scalar.
    """
    if one_process.batch_size == 1 or x.ndim < 2:
        return False
    return tokens is None or tokens[0] > 0


def compute_at_place(call: TorchCall, one_process: OneProcess, tokens: Tokens) -> Tensor:
    """Return this rank's part of a function of one row, computed with the sizes of one process.

    Other rows are zeros. Without ``tokens``, the tensor has samples only.
    """
    samples = has_samples(call.x, one_process, tokens)
    whole = resize(call.x, sizes_in_one_process(call.x, one_process, tokens))
    put_at_place(call.x, whole, one_process, tokens, samples)
    return take_from_place(call.on(whole), one_process, tokens, samples)


def sizes_in_one_process(x: Tensor, one_process: OneProcess, tokens: Tokens) -> list[int]:
    """Return the sizes that this rank's tensor ``x`` has in one process."""
    sizes = list(x.shape)
    if tokens is not None:
        sizes[tokens[0]] = tokens[1].total
    if has_samples(x, one_process, tokens):
        sizes[0] *= one_process.batch_size
    return sizes
