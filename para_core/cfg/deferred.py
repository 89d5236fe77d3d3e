"""Deferred tensors: placeholders for outputs that other ranks are computing, and for results of operators on them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.torch_internals import disabled_torch_function, make_wrapper_subclass, pytree, schema_of


@dataclass(frozen=True)
class Expected:
    """The expected shape, strides, dtype and device of a tensor that has no data yet."""

    like: Tensor  # On the meta device: it has a shape, strides and a dtype, but no data.
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


class LiveDeferred:
    """Weak references to all deferred tensors of one pipeline call.

    When the call ends, those still alive, in schedulers or callbacks, become ordinary tensors.
    """

    def __init__(self) -> None:
        self._live = WeakTensorKeyDictionary()

    def add(self, x: Deferred) -> None:
        self._live[x] = None

    def become_tensors(self) -> None:
        """Turn each deferred tensor that still exists into an ordinary tensor, in place.

        If its round never ended, because the call failed, it is filled with NaN, or 0 if its dtype has no NaN.
        """
        live = list(self._live)
        # Drop the weak references, because swap_tensors refuses tensors that have any.
        self._live.clear()
        for x in live:
            if x.is_ready:
                value = x.value().detach()
            else:
                fill = float("nan") if x.is_floating_point() or x.is_complex() else 0
                value = torch.full(x.shape, fill, dtype=x.dtype, device=x.device)
            # If the user holds a weak reference to the tensor, it cannot be swapped, and remains a Deferred that has
            # its data.
            if not weakref.getweakrefs(x):
                torch.utils.swap_tensors(x, value)


class PendingRound(Protocol):
    """A round of model calls, at the end of which the ranks exchange their results."""

    # Operator calls on this round's deferred tensors, in their order. They are postponed to the end of the round, and
    # made before anything can change these tensors in place.
    later: list[Callable[[], None]]
    # All deferred tensors of the pipeline call.
    live: LiveDeferred

    @property
    def is_over(self) -> bool: ...

    @property
    def waits_for_more(self) -> bool:
        """Whether fewer model calls than ranks are in this round, so that some ranks have nothing to compute yet."""

    def finish(self) -> None:
        """End the round: give all ranks the results of its model calls. This is a collective call."""


class Deferred(Tensor):
    """A tensor that gets its data when its round of model calls ends. An operator that needs the data earlier ends the
    round.

    Where possible, an operator on a deferred tensor returns a deferred tensor, too. Its ordinary tensor arguments are
    then copied, because pipelines may change these (latents, for example) in place.
    """

    of: PendingRound
    _get: Callable[[], Any]

    @staticmethod
    def make(of: PendingRound, expected: Expected, get: Callable[[], Any]) -> Deferred:
        """Return a deferred tensor like ``expected``, with the data that ``get`` returns when the round ``of`` ends."""
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
        """Return an ordinary tensor with the data. If the round has not ended, end it, which is a collective call."""
        if not self.of.is_over:
            self.of.finish()
        data: Tensor = self._get()
        return data

    # The methods below read data without the dispatcher, so __torch_dispatch__ does not intercept them.

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
        # Replace the tensors whose round is over by their data.
        args, kwargs = pytree.tree_map_only(Deferred, lambda x: x.value() if x.of.is_over else x, (args, kwargs or {}))
        if _can_wait(func, args, kwargs):
            deferred = _deferred(func, args, kwargs)
            if deferred is not None:
                return deferred
        return func(*materialize(args), **materialize(kwargs))


def materialize(tree: Any) -> Any:
    """Return the pytree ``tree`` with each deferred tensor replaced by its data. Ends their round (collective)."""
    if not any(isinstance(x, Deferred) for x in pytree.tree_leaves(tree)):
        return tree

    def change(x: Any) -> Any:
        if _is_model_output(x):
            return replace(x, **{name: materialize(value) for name, value in x.items()})
        return x.value() if isinstance(x, Deferred) else x

    return pytree.tree_map(change, tree, is_leaf=_is_model_output)


def _is_model_output(x: Any) -> bool:
    """Whether ``x`` is an output of diffusers or transformers, a dataclass that is also a dict of its fields.

    The dict has no entries for fields that are None. A pytree contains only the entries of the dict, so it cannot
    rebuild ``x`` if such a field is required.
    """
    return isinstance(x, dict) and is_dataclass(x)


def _can_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call ``func(*args, **kwargs)``, which has deferred arguments, should wait for the end of their round.

    The operator must neither draw random numbers nor change its arguments, and must run on one device. If some
    arguments are tensors that are not deferred, it must also be pointwise (others may take weights, which should not be
    copied), and the round must have fewer model calls than ranks, so that some ranks still have nothing to compute.
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
        # An operator that draws random numbers must not wait, because the order of draws must be that of a single
        # device.
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """Postpone a call of the operator ``func``, and return its results as deferred tensors. Return None and do nothing
    if their shapes depend on data, or if some result is not a tensor.
    """
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Deferred))
    outputs = run_without_data(func, args, kwargs)
    leaves, spec = pytree.tree_flatten(outputs)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Deferred) else x.clone(), (args, kwargs))
    results: list[Any] = []

    def compute() -> None:
        results.extend(pytree.tree_leaves(func(*materialize(args), **materialize(kwargs))))

    first.of.later.append(compute)
    deferred = [
        Deferred.make(first.of, Expected(leaf, first.device), partial(results.__getitem__, index))
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
        # Either the operator has no meta kernel, or the shapes of its results depend on data, or the arguments are
        # invalid. The caller then runs the operator on data, which raises the right error for invalid arguments.
        return None
