"""Lazy tensors: placeholders for data that other ranks are computing, and for results of operators on them.

There is one tensor subclass. What it waits for, and which operators can be postponed, is the policy of its
source: a round of guidance (:mod:`para_core.cfg.rounds`), or patches that arrive one after the other
(:mod:`para_core.weights.patches`). Hooks around models and callbacks (``adapters/``) replace them by data
with :func:`materialize`. Tests: tests/cfg/test_guidance.py, tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.dataclass_fields import leaves_of, map_leaves
from para_core.torch_internals import disabled_torch_function, make_wrapper_subclass, pytree, schema_of

# An operator in place that keeps the shape, although it has the tag of those that change it.
_DETACH = torch.ops.aten.detach_.default


@dataclass(frozen=True)
class Expected:
    """The expected shape, strides, dtype and device of a tensor that has no data yet."""

    like: Tensor  # On the meta device: it has a shape, strides and a dtype, but no data.
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


class LazySource(Protocol):
    """The policy of a lazy tensor: where its data comes from, and which operators on it can be postponed."""

    # All lazy tensors of the pipeline call.
    live: LiveTensors

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`value` neither waits nor exchanges anything."""

    def value(self) -> Tensor:
        """Return an ordinary tensor with the data. May wait, and may be a collective call.

        It is the same object at each call, because operators in place, and code that keeps it, change or
        compare this tensor. Afterwards :attr:`is_ready` is true.
        """

    def postpone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of the operator call ``func(*args, **kwargs)`` as lazy tensors; None to run it
        now.

        The arguments contain lazy tensors, of which this is the source of the first.
        """


class LiveTensors:
    """Weak references to all lazy tensors of one pipeline call.

    When the call ends, those still alive, in schedulers or callbacks, become ordinary tensors.
    """

    def __init__(self) -> None:
        self._live = WeakTensorKeyDictionary()
        # Sources that read other lazy tensors when they are asked for their data, and not before.
        self._readers: weakref.WeakSet[LazySource] = weakref.WeakSet()

    def add(self, x: LazyTensor) -> None:
        """Add ``x``, without keeping it alive."""
        self._live[x] = None

    def add_reader(self, source: LazySource) -> None:
        """Add ``source``, which reads other lazy tensors of the call, without keeping it alive."""
        self._readers.add(source)

    def run_readers(self) -> None:
        """Compute what reads lazy tensors, before one of these changes in place, or its memory is given to
        code that may change it. May wait.
        """
        readers = list(self._readers)
        self._readers.clear()
        for source in readers:
            source.value()

    def become_tensors(self) -> None:
        """Turn each lazy tensor that still exists into an ordinary tensor, in place.

        If its data never came, because the call failed, it is filled with NaN, or 0 if its dtype has no NaN.
        """
        # A view holds its base, and swap_tensors refuses a tensor that another one holds, so begin with the
        # last.
        live = list(self._live)[::-1]
        # Drop the weak references, because swap_tensors refuses tensors that have any.
        self._live.clear()
        for x in live:
            if x.source.is_ready:
                value = x.source.value().detach()
            else:
                fill: float = 0
                if x.is_floating_point() or x.is_complex():
                    fill = float("nan")
                value = torch.full(x.shape, fill, dtype=x.dtype, device=x.device)
            # If the user holds a weak reference to the tensor, it cannot be swapped. It remains a lazy
            # tensor, and gets this data.
            if weakref.getweakrefs(x):
                x.source = _PresentData(self, value)
            else:
                torch.utils.swap_tensors(x, value)
            # After the swap this is the lazy tensor, which may be a view.
            del value


@dataclass(eq=False)
class _PresentData:
    """The source of a lazy tensor whose data is ``data``."""

    live: LiveTensors
    data: Tensor
    is_ready: bool = True

    def value(self) -> Tensor:
        return self.data

    def postpone(self, func: Any, args: Any, kwargs: Any) -> Any:
        return None


class LazyTensor(Tensor):
    """A tensor whose data comes later from its :attr:`source`.
    An operator that cannot be postponed waits for it.
    """

    source: LazySource

    @staticmethod
    def make(source: LazySource, expected: Expected) -> LazyTensor:
        """Return a lazy tensor like ``expected`` with the data of ``source``, and add it to the live tensors."""
        like = expected.like
        lazy: LazyTensor = make_wrapper_subclass(
            LazyTensor, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        lazy.source = source
        source.live.add(lazy)
        return lazy

    # The methods below read data without the dispatcher, so __torch_dispatch__ does not intercept them. A
    # lazy tensor itself has no memory: its own data_ptr() is 0, and whoever reads DLPack from it reads from
    # there. Those that hand out the memory, which may then be written to, run the readers of the old data first.

    def data_ptr(self) -> int:
        return _hand_out(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return _hand_out(self).untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return _hand_out(self).__dlpack__(**options)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return _hand_out(self).numpy(*args, **kwargs)

    def __format__(self, format_spec: str) -> str:
        return format(self.source.value(), format_spec)

    def tolist(self) -> Any:
        return self.source.value().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.source.value(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.source.value())

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyTensor) and func is not _DETACH:
            # The data would get the new shape, but nothing can change the shape of the lazy tensor.
            raise RuntimeError(
                f"{func} changes the shape of a tensor in place, {list(args[0].shape)}, that is a result of a parallel "
                "model call. Use the function without the underscore, which returns another tensor."
            )
        lazy = [x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, LazyTensor)]
        args, kwargs = pytree.tree_map_only(LazyTensor, _ready_value, (args, kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, LazyTensor):
                results = x.source.postpone(func, args, kwargs)
                if results is not None:
                    return results
                break
        # The arguments of operators are nested in lists at most.
        args, kwargs = pytree.tree_map_only(LazyTensor, lambda x: x.source.value(), (args, kwargs))
        if _shares_memory(func):
            for x in lazy:
                x.source.live.run_readers()
        return func(*args, **kwargs)


@cache
def _shares_memory(func: Any) -> bool:
    """Whether the operator ``func`` changes an argument in place, or returns a view of one."""
    return any(argument.alias_info is not None for argument in schema_of(func).arguments)


def _hand_out(x: LazyTensor) -> Tensor:
    """Return the data of ``x`` to code that may change it, which no operator on ``x`` shows. So what reads
    ``x`` is computed first.
    """
    x.source.live.run_readers()
    return x.source.value()


def _ready_value(x: LazyTensor) -> Tensor:
    """Return the data of ``x`` if it is there, else ``x`` itself."""
    if not x.source.is_ready:
        return x
    return x.source.value()


def materialize(tree: Any) -> Any:
    """Return ``tree``, nested containers and dataclasses, with each lazy tensor replaced by its data;
    ``tree`` itself if there is none. Waits for the data; may be a collective call.
    """
    if not any(isinstance(x, LazyTensor) for x in leaves_of(tree)):
        return tree
    return map_leaves(_value_of, tree)


def _value_of(x: Any) -> Any:
    if isinstance(x, LazyTensor):
        return _hand_out(x)
    return x


def copy_ordinary_tensors(tree: Any) -> Any:
    """Return ``tree``, arguments of a postponed operator, with copies of its ordinary tensors, because
    pipelines may change these (latents, for example) in place.
    """

    def copy_if_ordinary(x: Tensor) -> Tensor:
        if isinstance(x, LazyTensor):
            return x
        return x.clone()

    return pytree.tree_map_only(Tensor, copy_if_ordinary, tree)


def run_without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of ``func`` as meta tensors; None if their shapes cannot be computed without data."""

    def without_data(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    args, kwargs = pytree.tree_map_only(Tensor, without_data, (args, kwargs))
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        # Either the operator has no meta kernel, or the shapes of its results depend on data, or the
        # arguments are invalid. The caller then runs the operator on data, which raises the right error for
        # invalid arguments. Errors of other types, such as IndexError for a dim, do not depend on data, so
        # they are raised here.
        return None
