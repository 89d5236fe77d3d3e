"""The tiles of an image distributed over ranks, where code that tiles and blends stays as it is.

Such code computes one tile after the other, and looks at none before it has all of them. So a rank computes those that are its own; what
is returned in place of any is a :class:`Pending`, which does not say yet what it holds. The first look at one exchanges all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.distributed.collectives import all_gather
from para_core.distributed.consistency import exchange
from para_core.distributed.mesh import GuidedMesh, MeshDim


class Tiles(TorchFunctionMode):
    """Inside, calls that go through :meth:`call` are computed by one rank each, tile by tile in turn.

    Args:
        ranks: among which tiles are distributed; ``mesh`` is the same ranks, for records.
    """

    def __init__(self, ranks: MeshDim, mesh: GuidedMesh) -> None:
        super().__init__()
        self.ranks, self.mesh = ranks, mesh
        self.tile = -1
        self.fresh = True
        self._values: dict[int, Any] = {}  # what this rank has, by number of the call
        self._owners: list[int] = []
        self._settled = 0  # so many calls were exchanged
        self._writes: list[tuple[Tensor, Any, Pending]] = []

    def begin_tile(self) -> None:
        """The next call is the first one of a tile, whatever it is given."""
        self.fresh = True

    def call(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Pending:
        """``call(*args, **kwargs)`` by the rank whose turn it is. A tile's later calls get what the earlier ones left (a cache)."""
        has_cache = kwargs.get("conv_cache") is not None or (kwargs.get("feat_cache") is not None and not self.fresh)
        if not has_cache:
            self.tile += 1
        self.fresh = False
        number, owner = len(self._owners), self.tile % self.ranks.size
        self._owners.append(owner)
        if owner == self.ranks.index:
            given = [self._own(x) for x in args]
            self._values[number] = call(*given, **{name: self._own(x) for name, x in kwargs.items()})
        return Pending(lambda: self._settle(number), lambda: self._values[number])

    def finished(self, value: Any) -> Any:
        """``value`` with what it holds of pending tensors."""
        self._write()
        if isinstance(value, Pending):
            return value.value()
        if isinstance(value, tuple):
            return tuple([self.finished(one) for one in value])
        if isinstance(value, dict):  # of diffusers' outputs, whose fields are attributes, too
            return type(value)(**{name: self.finished(one) for name, one in value.items()})
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], Pending) and not isinstance(args[0], Pending):
            self._writes.append((args[0], args[1], args[2]))
            return None
        if self._writes and any(x is target for x in args for target, _, _ in self._writes):
            self._write()
        if any(isinstance(x, Pending) for x in _flat(args)):
            return Pending.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _own(self, x: Any) -> Any:
        return x.own() if isinstance(x, Pending) else x

    def _write(self) -> None:
        writes, self._writes = self._writes, []
        for target, index, pending in writes:
            target[index] = pending.value()

    def _settle(self, number: int) -> Any:
        """Exchange what was computed since the last time: every rank gets here at the same look."""
        if number >= self._settled:
            self._exchange(range(self._settled, len(self._owners)))
            self._settled = len(self._owners)
        return self._values[number]

    def _exchange(self, numbers: range) -> None:
        mine = {n: _tensor(self._values[n]) for n in numbers if self._owners[n] == self.ranks.index}
        # In memory as its rank has it: a convolution that follows rounds differently where channels come last.
        shapes = {str(n): [list(x.shape), list(x.stride())] for n, x in mine.items()}
        any_own = next(iter(mine.values()), None)
        dtype = None if any_own is None else str(any_own.dtype).removeprefix("torch.")
        device = None if any_own is None else any_own.device.type
        records = exchange({"shapes": shapes, "dtype": dtype, "device": device}, self.mesh)
        known = next(record for record in records if record["dtype"] is not None)
        options = {"dtype": getattr(torch, known["dtype"]), "device": known["device"]}
        parts = [x.reshape(-1) for x in mine.values()]
        flat = torch.cat(parts) if parts else torch.empty(0, **options)
        counts = [[torch.Size(shape).numel() for shape, _ in record["shapes"].values()] for record in records]
        found = all_gather(flat, [sum(one) for one in counts], 0, self.ranks)
        of_ranks = found.split([sum(one) for one in counts])
        for record, sizes, part in zip(records, counts, of_ranks, strict=True):
            for (n, (shape, stride)), piece in zip(record["shapes"].items(), part.split(sizes), strict=True):
                if int(n) not in mine:
                    self._values[int(n)] = torch.empty_strided(shape, stride, **options).copy_(piece.view(shape))


def _tensor(value: Any) -> Tensor:
    """What is exchanged of a call's result; a cache behind it stays with its rank."""
    found: Tensor = value[0] if isinstance(value, tuple) else value
    return found


class Pending:
    """A tensor that a rank may not have yet. Functions of torch on it are pending, too; asking what it is brings it."""

    def __init__(self, find: Callable[[], Any], own: Callable[[], Any]) -> None:
        self._find, self._own = find, own
        self._found: Any = None

    def value(self) -> Any:
        if self._found is None:
            self._found = self._find()
        return self._found

    def own(self) -> Any:
        """What this rank computed itself, without an exchange."""
        return self._own()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return Pending(lambda: func(*_values(args), **kwargs), lambda: func(*_owned(args), **kwargs))

    def __getitem__(self, index: Any) -> Any:
        if self._found is not None:
            return self._found[index]
        return Pending(lambda: self.value()[index], lambda: self.own()[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value()[index] = value.value() if isinstance(value, Pending) else value

    def __iter__(self) -> Any:
        """Of a result and a cache: the first is exchanged, the second stays with its rank."""
        yield Pending(lambda: _tensor(self.value()), lambda: self.own()[0])
        yield Pending(lambda: self.own()[1], lambda: self.own()[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __mul__(self, other: Any) -> Any:
        return self.value() * other

    __rmul__ = __mul__


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]


def _values(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return type(args)([_values(one) for one in args])
    return args.value() if isinstance(args, Pending) else args


def _owned(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return type(args)([_owned(one) for one in args])
    return args.own() if isinstance(args, Pending) else args
