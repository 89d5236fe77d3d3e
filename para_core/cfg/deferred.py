"""Tensors whose data other ranks are still computing, and what is made of them until it is here."""

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
    """A tensor without its data."""

    like: Tensor  # on the meta device
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


class DeferredOp:
    """A function of tensors of a round, computed as soon as they are here: before anything can change them in place."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.leaves: list[Any] = []

    def compute(self) -> None:
        if self._call is not None:
            (func, args, kwargs), self._call = self._call, None
            self.leaves = pytree.tree_leaves(func(*materialize(args), **materialize(kwargs)))

    def leaf(self, place: int) -> Any:
        return self.leaves[place]


class LiveDeferred:
    """The deferred tensors of one pipeline call that something still holds.

    Schedulers keep the outputs of earlier steps, and callbacks may keep any tensor. When the call ends, each of these objects
    becomes an ordinary tensor, so nothing of this module outlives the call.
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
        """Turn each living deferred tensor into an ordinary one, in place. One whose data will never come becomes NaN (or 0)."""
        alive = [x for ref in self._refs if (x := ref()) is not None]
        self._refs.clear()  # swap_tensors takes no tensor with a weak reference
        for x in alive:
            value = x.value().detach() if x.is_ready else _lost(x)
            # An object that a user refers to weakly cannot be swapped. It stays deferred, with its data.
            if not weakref.getweakrefs(x):
                torch.utils.swap_tensors(x, value)


def _lost(x: Deferred) -> Tensor:
    """Return a tensor like ``x`` for a result that was never exchanged, because the call failed."""
    fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
    return torch.full(x.shape, fill, dtype=x.dtype, device=x.device)


class PendingRound(Protocol):
    """What is to end before the data is here: a round of calls."""

    # What was made of its tensors before they were here, in order.
    later: list[DeferredOp]
    # The deferred tensors of the pipeline call to which it belongs.
    live: LiveDeferred

    @property
    def is_over(self) -> bool: ...

    @property
    def waits_for_more(self) -> bool:
        """Whether ranks are left for another call."""

    def finish(self) -> None:
        """Wait for the data."""


class Deferred(Tensor):
    """A result of a round, or what a function makes of it; whatever needs its numbers ends the round.

    Tensors that a function takes besides are copied: pipelines go on with latents in place.
    """

    of: PendingRound
    _get: Callable[[], Any]

    @staticmethod
    def make(of: PendingRound, expected: Expected, get: Callable[[], Any]) -> Deferred:
        """Of the form of ``expected``; ``get`` gives the data when the round is over."""
        like = expected.like
        made: Deferred = make_wrapper_subclass(
            Deferred, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        made.of, made._get = of, get
        of.live.add(made)
        return made

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`value` returns without an exchange."""
        return self.of.is_over

    def value(self) -> Tensor:
        if not self.of.is_over:
            self.of.finish()
        found: Tensor = self._get()
        return found

    # What reads the data past the dispatcher.

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
    """``tree``, of any containers that pytree knows, with data in place of what is deferred; waits for it."""
    if not any(isinstance(x, Deferred) for x in pytree.tree_leaves(tree)):
        return tree
    return pytree.tree_map_only(Deferred, lambda x: x.value(), tree)


def _known_values(tree: Any) -> Any:
    return pytree.tree_map_only(Deferred, lambda x: x.value() if x.of.is_over else x, tree)


def _can_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``func`` gives the same if it is computed when the round is over, and is worth it.

    With tensors that are here, that is what pipelines do before they call the next branch: pointwise functions, while there are ranks left
    for one. Others may take weights, which are not to be copied.
    """
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    to_come, here = [x for x in tensors if isinstance(x, Deferred)], [x for x in tensors if not isinstance(x, Deferred)]
    devices = {x.device for x in to_come}
    return (
        len(devices) == 1
        and all(type(x) in (Tensor, nn.Parameter) and (x.device in devices or x.ndim == 0) for x in here)
        and kwargs.get("device") in (None, *devices)
        and not schema_of(func).is_mutable
        and (not here or (torch.Tag.pointwise in func.tags and to_come[0].of.waits_for_more))
        # Numbers would be drawn later than on one device.
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of tensors of which some are to come, to be computed later; None if what it gives depends on their numbers."""
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Deferred))
    on_meta = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    try:
        found = func(*_without_data(args), **_without_data(on_meta))
    except (NotImplementedError, RuntimeError):
        return None
    leaves, spec = pytree.tree_flatten(found)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    later = DeferredOp(func, *_as_they_are((args, kwargs)))
    first.of.later.append(later)
    made = [
        Deferred.make(first.of, Expected(leaf, first.device), partial(later.leaf, place))
        for place, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(made, spec)


def _without_data(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), tree
    )


def _as_they_are(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Deferred) else x.clone(), tree)
