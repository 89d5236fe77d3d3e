"""Guidance in parallel: branches that are called one after the other, each computed by a part of the ranks.

Only the ranks of one index along the ``batch`` mesh dim compute a call; all others go on with a tensor that is filled in when
it is needed (:class:`Deferred`). By then the next branch has been called, too, and one exchange gives every rank the results of
all. So the code in between, a pipeline's, stays as it is, and guidance that is skipped at some step costs nothing but time.

A round is what is called between two exchanges. A branch that is called alone is computed by the ranks of one index, too: all
would take as long, and where a cache decides by the branches that a rank has computed, they would not decide alike.

What a call gives must be known to the ranks that do not compute it: foreseen without data, or seen before, when a call of this
form was computed by all. At the end of a round with forms that are new, the ranks compare what they foresaw and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from para_core.agreement import agree, signature
from para_core.collectives import all_gather
from para_core.mesh import GuidedMesh, MeshDim, one_rank

# foresee(model, args, kwargs): what the call gives, with tensors on the meta device; None: not known before it is computed. Takes
# its verdict from what is the same on all ranks.
Foresee = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Expected:
    """A tensor without its data."""

    like: Tensor  # on the meta device
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


@dataclass(frozen=True)
class _Form:
    """What a call gives, without data: tensors, and None for what this call does not have.

    Args:
        leaves: its tensors.
        places: of each leaf of ``spec``, whether it is a tensor.
    """

    leaves: list[_Expected]
    spec: pytree.TreeSpec
    places: list[bool]

    @property
    def text(self) -> str:
        """Equal for equal forms, on every rank; how tensors lie in memory is no part of it, for they are sent."""
        tensors = iter([f"{x.like.dtype} {list(x.like.shape)} on {x.device.type}" for x in self.leaves])
        return f"{self.spec} of {', '.join([next(tensors) if place else 'None' for place in self.places])}"

    def with_tensors(self, tensors: list[Any]) -> Any:
        """What the call gives, with ``tensors`` at their places."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if place else None for place in self.places], self.spec)


@dataclass(frozen=True)
class _Call:
    """One call of a model in the round under way.

    Args:
        owner: index along the mesh dim of the ranks that compute it; None: all do.
        expected: its tensors.
        leaves: the same with data, where this rank has computed them.
        failure: why it has not, though it should have.
    """

    owner: int | None
    expected: list[_Expected]
    leaves: list[Tensor]
    failure: Exception | None = None


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
    """Shares out the calls of models among the ranks of ``dim``; for eager code, and one thread.

    Args:
        foresee: what a call will give; None: nobody knows, so all ranks compute the first call of each form.
    """

    def __init__(self, dim: MeshDim, foresee: Foresee | None = None) -> None:
        self._dim = dim
        self._mesh = GuidedMesh(dim, one_rank("cpu"))
        self._foresee = foresee
        self._round = _Round()
        # What a call gives, by what it was given.
        self._known: dict[Any, _Form] = {}
        # What this rank foresaw since all ranks last agreed.
        self._new: dict[Any, _Form | None] = {}
        # What came otherwise than foreseen.
        self._misjudged: set[Any] = set()
        # Whether the calls of now are distributed over ranks.
        self.active = False
        # Calls of each round of the generation.
        self.rounds: list[int] = []

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Inside, calls are distributed over ranks; when it is left, all that was deferred has its data."""
        self._round, self.rounds = _Round(), []
        self._forget_new()
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
        # Switches (return_dict, kv_cache_mode) decide the form of what is returned; numbers are of the step.
        key = (id(model), *[_signature(x) for x in leaves if isinstance(x, (Tensor, bool, str))])
        if key not in self._known:
            self._look_ahead(key, model, args, kwargs)
        form = self._known.get(key)
        owner = None if form is None else len(self._round.calls) % self._dim.size
        computed: list[Tensor] = []
        failure = None
        if form is None:
            form, computed = _computed(model, compute, args, kwargs)
            self._known[key] = form
        elif owner == self._dim.index:
            try:
                found, computed = _computed(model, compute, args, kwargs)
                if key in self._new and found.text != form.text:
                    self._misjudged.add(key)
                    raise RuntimeError(_misjudged(model, form, found))
            except Exception as error:
                # Of an error in a call that all ranks have made before, only this rank would know.
                if key not in self._new:
                    raise
                failure = error
        self._round.calls.append(_Call(owner, form.leaves, computed, failure))
        place = len(self._round.calls) - 1
        return form.with_tensors(
            [Deferred.result(self, self._round, place, leaf, x) for leaf, x in enumerate(form.leaves)]
        )

    def finish(self) -> None:
        """The round is over: its results are needed."""
        if not self._round.calls:
            return
        done, self._round = self._round, _Round()
        if self._new:
            self._agree(done.calls)
        done.results = self._exchange(done.calls)
        for later in done.later:
            later.compute()
        self.rounds.append(len(done.calls))

    @property
    def waits_for_more(self) -> bool:
        """Whether ranks are left for another call of the round under way."""
        return len(self._round.calls) < self._dim.size

    def _look_ahead(self, key: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find what the call of this form will give, if that can be known."""
        foreseen = None
        if self._foresee is not None and key not in self._misjudged:
            foreseen = self._foresee(model, args, kwargs)
        if foreseen is None:
            self._new[key] = None
            return
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel() > 1)
        form, _ = _form_of(foreseen, lambda x: _Expected(x, device))
        self._known[key] = self._new[key] = form

    def _agree(self, calls: list[_Call]) -> None:
        """Raise on all ranks if any foresaw something else than the others, or than what came."""
        failure = next((call.failure for call in calls if call.failure is not None), None)
        foreseen = [None if form is None else form.text for form in self._new.values()]
        try:
            agree(failure or signature({"the form of a model's output": foreseen}), self._mesh)
        except Exception:
            self._forget_new()
            if failure is not None:
                raise failure from None
            raise
        self._new = {}

    def _forget_new(self) -> None:
        for key in self._new:
            self._known.pop(key, None)
        self._new = {}

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


def _computed(
    model: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Form, list[Tensor]]:
    found = compute(*args, **kwargs)
    if not all(x is None or isinstance(x, Tensor) for x in pytree.tree_leaves(found)):
        raise TypeError(
            f"guidance cannot run in parallel: {type(model).__name__} returned something besides tensors. Use a mesh "
            "without a 'batch' dim."
        )
    return _form_of(found, lambda x: _Expected(x.to("meta"), x.device))


def _form_of(found: Any, expected: Callable[[Tensor], _Expected]) -> tuple[_Form, list[Tensor]]:
    """The form of what a call gave, and its tensors."""
    leaves, spec = pytree.tree_flatten(found)
    tensors = [x for x in leaves if x is not None]
    return _Form([expected(x) for x in tensors], spec, [x is not None for x in leaves]), tensors


def _misjudged(model: Any, foreseen: _Form, found: _Form) -> str:
    return (
        f"guidance in parallel expected {type(model).__name__} to return {foreseen.text}, as its config says; it returned "
        f"{found.text}. Call the pipeline again: all ranks will compute the first call, and know. Or use a mesh without a "
        "'batch' dim."
    )


def _signature(x: Tensor | bool | str) -> Any:
    return x if isinstance(x, (bool, str)) else (tuple(x.shape), x.dtype, x.device)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _total_bytes(call: _Call) -> int:
    return sum(x.num_bytes for x in call.expected)


class Deferred(Tensor):
    """A result of a round, or what a function makes of it; whatever needs its numbers ends the round.

    Tensors that a function takes besides are copied: pipelines go on with latents in place.
    """

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
        args, kwargs = _known_values((args, kwargs or {}))
        if _can_wait(func, args, kwargs):
            deferred = _deferred(func, args, kwargs)
            if deferred is not None:
                return deferred
        return func(*_values(args), **_values(kwargs))


def with_values(result: Any) -> Any:
    """``result`` with data in place of what was deferred, in any of the containers that pytree knows."""
    return _values(result) if any(isinstance(x, Deferred) for x in pytree.tree_leaves(result)) else result


def _values(tree: Any) -> Any:
    return pytree.tree_map_only(Deferred, lambda x: x.value(), tree)


def _known_values(tree: Any) -> Any:
    return pytree.tree_map_only(Deferred, lambda x: x if x._of.results is None else x.value(), tree)


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
        and not func._schema.is_mutable
        and (not here or (torch.Tag.pointwise in func.tags and to_come[0]._guidance.waits_for_more))
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
    later = _Later(func, *_as_they_are((args, kwargs)))
    first._of.later.append(later)
    made = [
        Deferred.make(first._guidance, first._of, _Expected(leaf, first.device), partial(later.leaf, place))
        for place, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(made, spec)


def _without_data(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), tree
    )


def _as_they_are(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Deferred) else x.clone(), tree)
