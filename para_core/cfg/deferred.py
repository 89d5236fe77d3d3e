"""Deferred tensors: placeholders for results that other ranks are still computing, and for operators on these."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from para_core.torch_internals import disabled_torch_function, make_wrapper_subclass, pytree, schema_of


@dataclass(frozen=True)
class Expected:
    """The expected shape, strides, dtype and device of a tensor that has no data yet."""

    like: Tensor  # A meta tensor with the shape, strides and dtype.
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


class DeferredOp:
    """A postponed call of an operator on deferred tensors.

    It runs as soon as the round of these tensors ends, before they can be changed in place.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.leaves: list[Any] = []

    def compute(self) -> None:
        if self._call is not None:
            (func, args, kwargs), self._call = self._call, None
            self.leaves = pytree.tree_leaves(func(*materialize(args), **materialize(kwargs)))

    def leaf(self, index: int) -> Any:
        return self.leaves[index]


class LiveDeferred:
    """The deferred tensors of one pipeline call that are still referenced.

    Schedulers keep outputs of earlier steps, and callbacks may keep any tensor. When the pipeline call ends, each of
    these objects becomes an ordinary tensor, so that no deferred tensor outlives the call.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Deferred]] = []
        self._prune_at = 256

    def add(self, x: Deferred) -> None:
        self._refs.append(weakref.ref(x))
        if len(self._refs) >= self._prune_at:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._prune_at = max(256, 2 * len(self._refs))

    def become_tensors(self) -> None:
        """Turn each deferred tensor that still exists into an ordinary tensor, in place.

        A tensor whose round never ended is filled with NaN (with 0 if its dtype has no NaN).
        """
        alive = [x for ref in self._refs if (x := ref()) is not None]
        self._refs.clear()  # swap_tensors refuses tensors with weak references.
        for x in alive:
            value = x.value().detach() if x.is_ready else _lost(x)
            # A tensor to which a user holds a weak reference cannot be swapped. It stays a Deferred with data.
            if not weakref.getweakrefs(x):
                torch.utils.swap_tensors(x, value)


def _lost(x: Deferred) -> Tensor:
    """Return a tensor like ``x`` filled with NaN (or 0), for a round that never ended because the call failed."""
    fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
    return torch.full(x.shape, fill, dtype=x.dtype, device=x.device)


class PendingRound(Protocol):
    """A round of model calls, at the end of which the ranks exchange their results."""

    # Postponed calls of operators on this round's deferred tensors, in order.
    later: list[DeferredOp]
    # All deferred tensors of the pipeline call.
    live: LiveDeferred

    @property
    def is_over(self) -> bool: ...

    @property
    def waits_for_more(self) -> bool:
        """Whether some ranks have no model call to compute in this round yet."""

    def finish(self) -> None:
        """End the round: exchange the results of its calls. This is a collective call."""


class Deferred(Tensor):
    """A tensor whose values are known when its round ends. An operation that needs the values earlier ends the round.

    If possible, operators on a deferred tensor return deferred tensors, too. Their other tensor arguments are copied,
    because pipelines may change them (such as latents) in place.
    """

    of: PendingRound
    _get: Callable[[], Any]

    @staticmethod
    def make(of: PendingRound, expected: Expected, get: Callable[[], Any]) -> Deferred:
        """Return a deferred tensor like ``expected``. After the round ``get()`` returns its data."""
        like = expected.like
        deferred: Deferred = make_wrapper_subclass(
            Deferred, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        deferred.of, deferred._get = of, get
        of.live.add(deferred)
        return deferred

    @property
    def is_ready(self) -> bool:
        """Whether the round has ended, so that :meth:`value` needs no exchange."""
        return self.of.is_over

    def value(self) -> Tensor:
        """Return an ordinary tensor with the data. This ends the round if it has not ended."""
        if not self.of.is_over:
            self.of.finish()
        data: Tensor = self._get()
        return data

    # These methods read data without the dispatcher, so __torch_dispatch__ does not see them.

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().numpy(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.value(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _known_values((args, kwargs or {}))
        if _can_wait(func, args, kwargs):
            deferred = _deferred(func, args, kwargs)
            if deferred is not None:
                return deferred
        return func(*materialize(args), **materialize(kwargs))


def materialize(tree: Any) -> Any:
    """Return ``tree`` with each deferred tensor replaced by an ordinary tensor with its data.

    ``tree`` may consist of any containers that pytree knows. This ends the rounds of the deferred tensors.
    """
    if not any(isinstance(x, Deferred) for x in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map_only(Deferred, lambda x: x.value(), tree)


def _known_values(tree: Any) -> Any:
    return pytree.tree_map_only(Deferred, lambda x: x.value() if x.of.is_over else x, tree)


def _can_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of the operator ``func`` can and should be postponed until the round ends.

    The result must be the same then. If some tensor arguments are not deferred, the operator must be pointwise (as
    those that pipelines run between two branches are), and the round must wait for another model call. Other operators
    may take weights, which should not be copied.
    """
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    deferred = [x for x in tensors if isinstance(x, Deferred)]
    others = [x for x in tensors if not isinstance(x, Deferred)]
    devices = {x.device for x in deferred}
    return (
        len(devices) == 1
        and all(type(x) in (Tensor, nn.Parameter) and (x.device in devices or x.ndim == 0) for x in others)
        and kwargs.get("device") in (None, *devices)
        and not schema_of(func).is_mutable
        and (not others or (torch.Tag.pointwise in func.tags and deferred[0].of.waits_for_more))
        # Random numbers must be drawn in the same order as on a single device.
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """Postpone a call of the operator ``func``, and return its results as deferred tensors.

    Return None, and postpone nothing, if the shapes of the results depend on values, or if not all results are tensors.
    """
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Deferred))
    outputs = run_without_data(func, args, kwargs)
    leaves, spec = pytree.tree_flatten(outputs)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    operation = DeferredOp(func, *_copied((args, kwargs)))
    first.of.later.append(operation)
    deferred = [
        Deferred.make(first.of, Expected(leaf, first.device), partial(operation.leaf, index))
        for index, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(deferred, spec)


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
        # Either the operator has no meta kernel, or the shapes of its results depend on values, or the arguments are
        # invalid. The caller then runs it on data, which raises the right error for invalid arguments.
        return None


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Deferred) else x.clone(), tree)
