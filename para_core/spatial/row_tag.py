"""Sharded rows: the tag of a tensor that holds some, the sizes that carry their numbers, and the error for
mixing them.

The rules set and read tags (:mod:`.rules`), and the autoencoders read those of what they return. Who has
which rows of a tag is exchanged in :mod:`.fetch`. Tests: tests/spatial/test_functions.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from para_core.dataclass_fields import like_sequence
from para_core.layout.windows import Sizes
from para_core.torch_functions import Function, name_of

_TAG = "_para_core_rows"


@dataclass(frozen=True)
class RowTag:
    """The sharding of one dim of a tensor over ranks.

    In the full tensor, ``dim`` consists of ``outer`` consecutive runs of ``sum(sizes)`` units, and rank r
    holds ``sizes[r]`` units of each run. A unit is a row, or a fixed number of elements that belong to rows.
    For example, video tokens in the order (T, H, W) have ``outer`` = T runs of H · W units.
    """

    dim: int
    sizes: Sizes
    outer: int = 1

    @property
    def total(self) -> int:
        """The size of ``dim`` in the full tensor."""
        return self.outer * sum(self.sizes)

    def at(self, dim: int) -> RowTag:
        """Return this sharding for a tensor that holds the rows in ``dim``."""
        return replace(self, dim=dim)


def rows_of(x: Any) -> RowTag | None:
    """Return the tag of ``x``; None if ``x`` is not a tensor or not sharded."""
    if not isinstance(x, Tensor):
        return None
    rows: RowTag | None = getattr(x, _TAG, None)
    return rows


def set_rows(x: Tensor, rows: RowTag) -> Tensor:
    """Mark ``x`` as this rank's part of a tensor that is sharded as ``rows`` says, and return ``x`` itself.

    The mark is an attribute of this Python object. Views and results do not inherit it: each rule of the mode
    marks what it returns, and a function that runs where the mode is off returns unmarked tensors.
    """
    setattr(x, _TAG, rows)
    return x


def clear_rows(x: Tensor) -> Tensor:
    """Remove the mark of :func:`set_rows` from ``x``, and return ``x`` itself."""
    if hasattr(x, _TAG):
        delattr(x, _TAG)
    return x


class ShardedSize(int):
    """The size of the full tensor along its sharded dim: an int in ``x.shape`` that also carries those of the
    ranks.

    Model code that reads this size computes and branches as on one device, equally on every rank. If the size
    is one of those of a new tensor, that tensor is sharded too (:func:`sharded_dim`); in ``x.expand(...)`` it
    stands for this rank's number of rows (:func:`local_sizes`), in a reshape for all rows (:func:`full_sizes`).

    A product with an int is a :class:`ShardedSize` again, and so is a quotient if the number of each rank is
    divisible; any other result is a plain number. Several runs (``outer``, as in :class:`RowTag`) count as one
    in such a result: nothing says which of its factors are runs.

    >>> rows = ShardedSize((3, 4), rank=0)
    >>> import copy
    >>> copy.deepcopy(rows).sizes
    (3, 4)
    >>> rows, (rows * 2).sizes, (rows * 2).local, rows // 2, rows % 2, rows * 0.5
    (7, (6, 8), 6, 3, 1, 3.5)
    >>> type(rows * rows)
    <class 'int'>
    >>> tokens = ShardedSize((3, 4), 0, outer=5)
    >>> tokens, tokens.local, (tokens * 2).sizes
    (35, 15, (30, 40))
    """

    sizes: Sizes
    rank: int
    outer: int

    def __new__(cls, sizes: Sizes, rank: int, outer: int = 1) -> ShardedSize:
        size = super().__new__(cls, outer * sum(sizes))
        size.sizes, size.rank, size.outer = sizes, rank, outer
        return size

    def __getnewargs__(self) -> tuple[Sizes, int, int]:  # type: ignore[override]
        """Return the arguments of a copy: int has one, this class has three."""
        return self.sizes, self.rank, self.outer

    @property
    def of_ranks(self) -> Sizes:
        """The number of each rank."""
        return tuple([self.outer * count for count in self.sizes])

    @property
    def local(self) -> int:
        """The number of this rank."""
        return self.of_ranks[self.rank]

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, ShardedSize):
            # int(self) * other would ask other.__rmul__, and so carry the sizes of other alone.
            return int(self) * int(other)
        if type(other) is not int:
            return int(self) * other
        return ShardedSize(tuple([count * other for count in self.of_ranks]), self.rank)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is not int or any(count % other for count in self.of_ranks):
            return int(self) // other
        return ShardedSize(tuple([count // other for count in self.of_ranks]), self.rank)


def local_sizes(value: Any) -> Any:
    """Return ``value``, a size or nested sizes, with each :class:`ShardedSize` replaced by this rank's rows."""
    if isinstance(value, ShardedSize):
        return value.local
    if isinstance(value, (tuple, list)):
        return like_sequence(value, [local_sizes(item) for item in value])
    return value


def full_sizes(value: Any) -> Any:
    """Return ``value``, a size or nested sizes, with each :class:`ShardedSize` replaced by a plain int."""
    if isinstance(value, ShardedSize):
        return int(value)
    if isinstance(value, (tuple, list)):
        return like_sequence(value, [full_sizes(item) for item in value])
    return value


def sharded_dim(shape: Sequence[Any]) -> RowTag | None:
    """Return the tag of a new tensor of this ``shape``, sharded along the dim of the only :class:`ShardedSize`;
    None if there is none or several.

    A shape with several of them is that of an attention mask, whose rows and columns are tokens.
    """
    tags = [
        RowTag(dim, size.sizes, size.outer) for dim, size in enumerate(shape) if isinstance(size, ShardedSize)
    ]
    if len(tags) != 1:
        return None
    return tags[0]


def first_sharded(values: Iterable[Any]) -> RowTag | ShardedSize | None:
    """Return the tag of the first sharded tensor in ``values`` and in lists and tuples among them.

    Without a sharded tensor, return the first :class:`ShardedSize`, or None. Dicts are not looked into: no function
    of torch that a mode sees takes tensors in one.
    """
    size: RowTag | ShardedSize | None = None
    for value in values:
        tag: RowTag | ShardedSize | None
        if isinstance(value, (list, tuple)):
            tag = first_sharded(value)
        elif isinstance(value, ShardedSize):
            tag = value
        else:
            tag = rows_of(value)
        if isinstance(tag, RowTag):
            return tag
        if size is None:
            size = tag
    return size


class MixesRows(RuntimeError):
    """An error for a function that has no rule for sharded rows, or combines rows in an unsupported way."""


def mixing_error(func: Function, rows: RowTag | ShardedSize | None, reason: str) -> MixesRows:
    """Return (not raise) the error that ``func`` cannot run on tensors sharded as ``rows``, for ``reason``."""
    sharding = ""
    if isinstance(rows, RowTag):
        sharding = (
            f" on a tensor whose dim {rows.dim} is sharded over {len(rows.sizes)} ranks as {list(rows.sizes)}"
        )
        if rows.outer > 1:
            sharding += f" in each of {rows.outer} runs"
    return MixesRows(
        f"{name_of(func)}{sharding}: {reason}. Leave out what calls it, or run this model on one rank: "
        "unparallelize_vae(vae), or unparallelize_pipe(pipe) for a UNet. A VAE may run in distributed tiles instead "
        "(method='tiled')."
    )
