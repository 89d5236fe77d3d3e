"""Distribute the tiles of an image over ranks, without changing the code for tiling and blending.

Such code computes all tiles before it reads the first one. Each rank therefore computes only its own tiles,
and represents every tile by a :class:`Pending`, a tensor whose value it may not have yet. The first read of a
tile exchanges all tiles.

``adapters/vae/run.py`` makes a :class:`Tiles` for each tiled call of an autoencoder. Rows of one image over
ranks, without tiles, are :mod:`.mode`. Tests: tests/spatial/test_vaes.py, and tests/spatial/test_functions.py
for :class:`Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.dataclass_fields import leaves_of, like_sequence
from para_core.distributed.agree import exchange
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import GuidedMesh, MeshDim
from para_core.torch_functions import is_in_place
from para_core.torch_internals import storage_id


class Tiles(TorchFunctionMode):
    """Mode in which tiles are distributed round-robin over ranks: each call through :meth:`call` runs on one
    rank only.

    ``ranks`` are the ranks over which tiles are distributed, ``mesh`` the same ranks, for the exchange of
    shapes. All ranks must make the same calls, and read the tiles in the same order, because a read may be an
    exchange.
    """

    def __init__(self, ranks: MeshDim, mesh: GuidedMesh) -> None:
        super().__init__()
        self.ranks, self.mesh = ranks, mesh
        # The number of the current tile, by which its rank is chosen.
        self._tile = -1
        # Whether the next call begins a tile. A VAE passes its ``feat_cache``, a list of None, also to the
        # first call of a tile; its ``conv_cache`` is None in that call.
        self._is_fresh = True
        # The outputs that this rank has computed or received, by number of the call.
        self._values: dict[int, Any] = {}
        self._owners: list[int] = []
        # Number of calls whose outputs every rank has.
        self._num_exchanged = 0
        # Writes of pending tiles into other tensors, as (target, index, tile), until a tensor with the memory
        # of one of the targets is read.
        self._writes: list[tuple[Tensor, Any, Pending]] = []
        # The memory of their targets, which is looked up for each function.
        self._written: set[int] = set()

    def begin_tile(self) -> None:
        """Make the next call start a new tile, even if its argument ``feat_cache`` says that it continues one."""
        self._is_fresh = True

    def call(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Pending:
        """Run ``call(*args, **kwargs)`` on the rank of the current tile, and return its output as a pending
        tensor.

        A call that gets a cache of frames, ``conv_cache`` or ``feat_cache``, belongs to the same tile as the
        previous call, unless :meth:`begin_tile` was called in between.
        """
        has_cache = kwargs.get("conv_cache") is not None or (
            kwargs.get("feat_cache") is not None and not self._is_fresh
        )
        if not has_cache:
            self._tile += 1
        self._is_fresh = False
        number, owner = len(self._owners), self._tile % self.ranks.size
        self._owners.append(owner)
        if owner == self.ranks.index:
            self._values[number] = call(
                *map(_local_value, args), **{name: _local_value(x) for name, x in kwargs.items()}
            )
        return Pending(lambda: self._value(number), lambda: self._values[number])

    def materialize(self, value: Any) -> Any:
        """Return ``value`` with all pending tensors replaced by their values, after an exchange if necessary."""
        self._write()
        if isinstance(value, Pending):
            return value.value()
        if isinstance(value, tuple):
            return tuple([self.materialize(item) for item in value])
        # A ModelOutput of diffusers is a dict whose class takes its entries as keyword arguments.
        if isinstance(value, dict):
            return type(value)(**{name: self.materialize(item) for name, item in value.items()})
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], Pending) and not isinstance(args[0], Pending):
            self._writes.append((args[0], args[1], args[2]))
            self._written.add(storage_id(args[0].untyped_storage()))
            return None
        if self._writes and self._reads_target((*args, *(kwargs or {}).values())):
            self._write()
        if _holds_pending(args) or any(_holds_pending(arg) for arg in args if isinstance(arg, (list, tuple))):
            return Pending.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _reads_target(self, values: Iterable[Any]) -> bool:
        """Whether a tensor in nested ``values`` is, or shares memory with, the target of a postponed write."""
        tensors = [x for x in leaves_of(list(values)) if isinstance(x, Tensor)]
        return any(storage_id(x.untyped_storage()) in self._written for x in tensors)

    def _write(self) -> None:
        """Run the postponed writes of tiles into tensors. Collective if one of the tiles is new."""
        writes, self._writes, self._written = self._writes, [], set()
        for target, index, pending in writes:
            target[index] = pending.value()

    def _value(self, number: int) -> Any:
        """Return the output of call ``number``. Collective if it is new: all new outputs are then exchanged."""
        if number >= self._num_exchanged:
            self._exchange(range(self._num_exchanged, len(self._owners)))
            self._num_exchanged = len(self._owners)
        return self._values[number]

    def _exchange(self, numbers: range) -> None:
        """Send the outputs of the calls ``numbers`` that this rank ran to all ranks, and store those of the
        others.

        Collective. All outputs must have one dtype. Those of other ranks are put on the current device.
        """
        local = {n: _output_tensor(self._values[n]) for n in numbers if self._owners[n] == self.ranks.index}
        # Send the strides as well, because a convolution rounds differently if channels come last in memory.
        shapes = {str(n): [list(x.shape), list(x.stride())] for n, x in local.items()}
        sample = next(iter(local.values()), None)
        record: dict[str, Any] = {"shapes": shapes, "dtype": None, "device": None}
        if sample is not None:
            record |= {"dtype": str(sample.dtype).removeprefix("torch."), "device": sample.device.type}
        records = exchange(record, self.mesh)
        first = next(record for record in records if record["dtype"] is not None)
        options = {"dtype": getattr(torch, first["dtype"]), "device": first["device"]}
        flat = torch.empty(0, **options)
        if local:
            flat = torch.cat([x.reshape(-1) for x in local.values()])
        counts = [[torch.Size(shape).numel() for shape, _ in record["shapes"].values()] for record in records]
        totals = list(map(sum, counts))
        parts_of_ranks = all_gather(flat, totals, 0, self.ranks).split(totals)
        for record, sizes, part in zip(records, counts, parts_of_ranks, strict=True):
            for (n, (shape, stride)), piece in zip(record["shapes"].items(), part.split(sizes), strict=True):
                if int(n) not in local:
                    self._values[int(n)] = torch.empty_strided(shape, stride, **options).copy_(
                        piece.view(shape)
                    )


def _holds_pending(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Pending) for value in values)


def _output_tensor(value: Any) -> Tensor:
    """Return the tensor in the output of a call, which may be a tuple (tensor, cache).
    The cache is not exchanged.
    """
    x: Tensor = value
    if isinstance(value, tuple):
        x = value[0]
    return x


class Pending:
    """A tensor whose value this rank may not have yet. Torch functions and indices return another one. Its
    attributes and methods, and ``*``, read the value.

    A function runs when its result is first read, so nothing may write to its arguments in between: tiling
    code blends tiles, in place, before it concatenates them. Another operator, such as ``+`` with a pending
    tensor on its left, raises ``TypeError`` on all ranks: the autoencoders of ``adapters/vae/families.py``
    use none.

    Args:
        get: Returns the value, after an exchange if necessary.
        get_local: Returns the value without an exchange. Only called on the rank that computed the value.
    """

    def __init__(self, get: Callable[[], Any], get_local: Callable[[], Any]) -> None:
        self._get, self.local_value = get, get_local
        self._value: Any = None

    def value(self) -> Any:
        """Return the value. Collective if its tile is new."""
        if self._value is None:
            self._value = self._get()
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(args[0] if args else None, Pending) and is_in_place(func):
            # Write into a tensor now, as who reads that tensor need not read the result.
            return func(*_map(args, _value), **{name: _map(x, _value) for name, x in kwargs.items()})

        def run(read: Callable[[Any], Any]) -> Any:
            return func(*_map(args, read), **{name: _map(x, read) for name, x in kwargs.items()})

        return Pending(lambda: run(_value), lambda: run(_local_value))

    def __getitem__(self, index: Any) -> Any:
        if self._value is not None:
            return self._value[index]
        return Pending(lambda: self.value()[index], lambda: self.local_value()[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value()[index] = _value(value)

    def __iter__(self) -> Any:
        """Yield the output and the cache of a call that returns both.
        The cache stays on the rank that computed it.
        """
        yield Pending(lambda: _output_tensor(self.value()), lambda: self.local_value()[0])
        yield Pending(lambda: self.local_value()[1], lambda: self.local_value()[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __mul__(self, other: Any) -> Any:
        return self.value() * other

    __rmul__ = __mul__


def _map(args: Any, read: Callable[[Any], Any]) -> Any:
    """Return ``args`` with ``read`` applied to each item, also in nested lists and tuples."""
    if isinstance(args, (list, tuple)):
        return like_sequence(args, [_map(item, read) for item in args])
    return read(args)


def _value(x: Any) -> Any:
    if isinstance(x, Pending):
        return x.value()
    return x


def _local_value(x: Any) -> Any:
    if isinstance(x, Pending):
        return x.local_value()
    return x
