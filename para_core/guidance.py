"""Guidance in parallel: branches that are called one after the other, each computed by a part of the ranks.

Only the ranks of one index along the ``batch`` mesh dim compute a call; all others go on with a tensor that is filled in when
it is needed (:class:`Deferred`). By then the next branch has been called, too, and one exchange gives every rank the results of
all. So the code in between, a pipeline's, stays as it is, and guidance that is skipped at some step costs nothing but time.

A round is what is called between two exchanges. As many branches are expected as the round before had: one alone is
computed by all ranks, which then exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from para_core.collectives import all_gather
from para_core.mesh import MeshDim


@dataclass(frozen=True)
class _Expected:
    """A tensor without its data."""

    like: Tensor  # on the meta device
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


@dataclass(frozen=True)
class _Call:
    """One call of a model in the round under way.

    Args:
        owner: index along the mesh dim of the ranks that compute it; None: all do.
        expected: its tensors.
        leaves: the same with data, where this rank has computed them.
    """

    owner: int | None
    expected: list[_Expected]
    leaves: list[Tensor]


@dataclass
class _Round:
    calls: list[_Call] = field(default_factory=list)
    # Of each call its tensors, once they are here.
    results: list[list[Tensor]] | None = None
    # What was made of them before they were here, in order.
    later: list[_Later] = field(default_factory=list)


class _Later:
    """A function of tensors of a round, computed as soon as they are here: before anything can change them in place."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.leaves: list[Any] = []

    def compute(self) -> None:
        if self._call is not None:
            (func, args, kwargs), self._call = self._call, None
            self.leaves = pytree.tree_leaves(func(*_values(args), **_values(kwargs)))

    def leaf(self, place: int) -> Any:
        return self.leaves[place]


class Guidance:
    """Shares out the calls of models among the ranks of ``dim``; for eager code, and one thread."""

    def __init__(self, dim: MeshDim) -> None:
        self._dim = dim
        self._round = _Round()
        self._expected_calls = dim.size
        # What a call gives, by what it was given: known once it was computed here.
        self._known: dict[Any, tuple[list[_Expected], pytree.TreeSpec]] = {}
        # Whether the calls of now are distributed over ranks.
        self.active = False
        # Calls of each round since begin().
        self.rounds: list[int] = []

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Inside, calls are distributed over ranks; when it is left, all that was deferred has its data."""
        self._round, self._expected_calls, self.rounds = _Round(), self._dim.size, []
        self.active = True
        try:
            yield
            self.finish()
        finally:
            self.active = False

    def call(self, model: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``compute(*args, **kwargs)`` gives, or will give; with tensors of the same sizes and the same switches, the same form."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Deferred) and x._of is self._round for x in leaves):
            # Not only the ranks that compute this call need it.
            self.finish()
        args, kwargs = _values((args, kwargs))
        # Switches (return_dict) decide the form of what is returned; numbers are of the step.
        key = (id(model), *[_signature(x) for x in leaves if isinstance(x, (Tensor, bool))])
        owner = len(self._round.calls) % self._dim.size if self._expected_calls > 1 and key in self._known else None
        computed: list[Tensor] = []
        if owner in (None, self._dim.index):
            computed, spec = pytree.tree_flatten(compute(*args, **kwargs))
            if not all(isinstance(x, Tensor) for x in computed):
                raise TypeError(
                    f"guidance cannot run in parallel: {type(model).__name__} returned something besides tensors. Use a mesh "
                    "without a 'batch' dim."
                )
            self._known[key] = [_Expected(x.to("meta"), x.device) for x in computed], spec
        expected, spec = self._known[key]
        self._round.calls.append(_Call(owner, expected, computed))
        place = len(self._round.calls) - 1
        return pytree.tree_unflatten(
            [Deferred.result(self, self._round, place, leaf, x) for leaf, x in enumerate(expected)], spec
        )

    def finish(self) -> None:
        """The round is over: its results are needed."""
        if not self._round.calls:
            return
        done, self._round = self._round, _Round()
        done.results = self._exchange(done.calls)
        for later in done.later:
            later.compute()
        self._expected_calls = len(done.calls)
        self.rounds.append(len(done.calls))

    def _exchange(self, calls: list[_Call]) -> list[list[Tensor]]:
        """Of each call its tensors, from the ranks that computed it."""
        shared = [call for call in calls if call.owner is not None]
        if not shared:
            return [call.leaves for call in calls]
        sizes = [
            sum(x.num_bytes for call in shared if call.owner == rank for x in call.expected)
            for rank in range(self._dim.size)
        ]
        own = [_as_bytes(x) for call in shared if call.owner == self._dim.index for x in call.leaves]
        nothing = torch.empty(0, dtype=torch.uint8, device=shared[0].expected[0].device)
        received = list(all_gather(torch.cat([nothing, *own]), sizes, 0, self._dim).split(sizes))
        results = []
        for call in calls:
            leaves = list(call.leaves)
            if call.owner is not None:
                parts = received[call.owner].split(
                    [*[x.num_bytes for x in call.expected], received[call.owner].numel() - _total_bytes(call)]
                )
                received[call.owner] = parts[-1]
                # Copies, for the bytes of a tensor may start anywhere.
                leaves = [
                    part.clone().view(x.like.dtype).view(x.like.shape)
                    for part, x in zip(parts[:-1], call.expected, strict=True)
                ]
            results.append(leaves)
        return results


def _signature(x: Tensor | bool) -> Any:
    return x if isinstance(x, bool) else (tuple(x.shape), x.dtype, x.device)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _total_bytes(call: _Call) -> int:
    return sum(x.num_bytes for x in call.expected)


class Deferred(Tensor):
    """A result of a round, or what a function of such tensors alone makes of them; whatever else needs it ends the round."""

    _guidance: Guidance
    _of: _Round
    _get: Callable[[], Any]

    @staticmethod
    def make(guidance: Guidance, of: _Round, expected: _Expected, get: Callable[[], Any]) -> Deferred:
        like = expected.like
        made: Deferred = Tensor._make_wrapper_subclass(
            Deferred, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        made._guidance, made._of, made._get = guidance, of, get
        return made

    @staticmethod
    def result(guidance: Guidance, of: _Round, place: int, leaf: int, expected: _Expected) -> Deferred:
        return Deferred.make(guidance, of, expected, lambda: None if of.results is None else of.results[place][leaf])

    def value(self) -> Tensor:
        if self._of.results is None:
            self._guidance.finish()
        found: Tensor = self._get()
        return found

    # What reads the data past the dispatcher.

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().numpy(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors: list[Any] = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        of = next(x._of for x in tensors if isinstance(x, Deferred))
        if all(isinstance(x, Deferred) and x._of is of for x in tensors) and of.results is None:
            deferred = None if func._schema.is_mutable else _deferred(tensors[0], func, args, kwargs)
            if deferred is not None:
                return deferred
        return func(*_values(args), **_values(kwargs))


def _values(tree: Any) -> Any:
    return pytree.tree_map_only(Deferred, lambda x: x.value(), tree)


def _deferred(x: Deferred, func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of tensors like ``x``, to be computed later; None if now, for it gives no tensors on the same device."""
    if kwargs.get("device") not in (None, x.device):
        return None
    on_meta = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    try:
        found = func(*_without_data(args), **_without_data(on_meta))
    except (NotImplementedError, RuntimeError):
        return None
    leaves, spec = pytree.tree_flatten(found)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    later = _Later(func, args, kwargs)
    x._of.later.append(later)
    made = [
        Deferred.make(x._guidance, x._of, _Expected(leaf, x.device), partial(later.leaf, place))
        for place, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(made, spec)


def _without_data(tree: Any) -> Any:
    return pytree.tree_map_only(
        Deferred, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), tree
    )
