"""A counter of the launches of a model call, of the bytes they read and write, and of the peak bytes of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from para_core.torch_internals import OpOverload, TorchDispatchMode, pytree, schema_of, storage_id

# These operators launch nothing on a device, although they are not views: allocations and a reshape.
NO_LAUNCH = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::linear"}


class LaunchCounter(TorchDispatchMode):
    """A mode that counts launches, the bytes that they read and write, and the peak bytes of tensors in memory.

    A launch is an operator that is neither a view nor an allocation. :attr:`moved` (bytes read and written) and
    :attr:`peak` are lists of two numbers: bytes while :attr:`is_sharded` is True, and bytes otherwise.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.moved, self.peak = 0, [0, 0], [0, 0]
        self.is_sharded = self.in_attention = False
        self._held = [0, 0]
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = tensors_in((args, kwargs))
        out = func(*args, **(kwargs or {}))
        bin_, name = int(not self.is_sharded), schema_of(func).name
        results = tensors_in(out)
        self._hold(results, {storage_id(x.untyped_storage()) for x in operands}, bin_)
        is_launch = name not in NO_LAUNCH and func.namespace != "prim" and not is_view(func)
        if is_launch and not self.in_attention:
            self.launches += 1
            if name not in _PRODUCTS:
                self.moved[bin_] += sum(_bytes_of(x) for x in (*operands, *results))
        return out

    def _hold(self, results: Sequence[Tensor], operands: set[int], bin_: int) -> None:
        for x in results:
            storage = x.untyped_storage()
            key = storage_id(storage)
            if key not in self._storages and key not in operands:
                self._storages.add(key)
                weakref.finalize(storage, self._free, key, storage.nbytes(), bin_)
                self._held[bin_] += storage.nbytes()
        if sum(self._held) > sum(self.peak):
            self.peak = list(self._held)

    def _free(self, key: int, size: int, bin_: int) -> None:
        self._storages.discard(key)
        self._held[bin_] -= size


def _bytes_of(x: Tensor) -> int:
    """Return the number of bytes of memory that ``x`` covers. It is less than ``x.nbytes`` if ``x`` is expanded."""
    return int(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()))


def tensors_in(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns a view of an argument.

    False for in-place operators, which return the argument they write.
    """
    aliases = [returned.alias_info for returned in schema_of(func).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
