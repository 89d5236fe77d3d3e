"""CFG parallelism: sequential CFG passes, each computed by a part of the ranks.

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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from para_core.cfg.deferred import Deferred, DeferredOp, Expected, LiveDeferred, materialize
from para_core.distributed.collectives import all_gather, tensor_bytes
from para_core.distributed.consistency import check_consistent, signature
from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.torch_internals import pytree

# foresee(model, args, kwargs): what the call gives, with tensors on the meta device; None: not known before it is computed. Takes
# its verdict from what is the same on all ranks.
Foresee = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Form:
    """What a call gives, without data: tensors, and None for what this call does not have.

    Args:
        leaves: its tensors.
        places: of each leaf of ``spec``, whether it is a tensor.
    """

    leaves: list[Expected]
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
    expected: list[Expected]
    leaves: list[Tensor]
    failure: Exception | None = None


@dataclass
class _Round:
    """The calls between two exchanges, of which each of ``size`` ranks computes some; ``finish`` exchanges."""

    size: int
    finish: Callable[[], None]
    live: LiveDeferred
    calls: list[_Call] = field(default_factory=list)
    # Of each call its tensors, once they are here.
    results: list[list[Tensor]] | None = None
    # What was made of them before they were here, in order.
    later: list[DeferredOp] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.results is not None

    @property
    def waits_for_more(self) -> bool:
        return len(self.calls) < self.size

    def deferred(self, place: int) -> list[Deferred]:
        """The tensors of a call, before they are here."""

        def get(leaf: int) -> Any:
            return None if self.results is None else self.results[place][leaf]

        return [Deferred.make(self, x, partial(get, leaf)) for leaf, x in enumerate(self.calls[place].expected)]


class Guidance:
    """Shares out the calls of models among the ranks of ``dim``; for eager code, and one thread.

    Args:
        foresee: what a call will give; None: nobody knows, so all ranks compute the first call of each form.
    """

    def __init__(self, dim: MeshDim, foresee: Foresee | None = None) -> None:
        self._dim = dim
        self._mesh = replace(one_guided_rank("cpu"), batch=dim)
        self._foresee = foresee
        self._live = LiveDeferred()
        self._round = self._begin()
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
        """Inside, calls are distributed over ranks; when it is left, each deferred tensor has become an ordinary one."""
        self._live = LiveDeferred()
        self._round, self.rounds = self._begin(), []
        self._forget_new()
        self.active = True
        try:
            yield
            self.finish()
        finally:
            self.active = False
            self._live.become_tensors()

    def call(self, model: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``compute(*args, **kwargs)`` gives, or will give; with tensors of the same sizes and the same switches, the same form."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Deferred) and x.of is self._round for x in leaves):
            # Not only the ranks that compute this call need it.
            self.finish()
        args, kwargs = materialize((args, kwargs))
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
        return form.with_tensors(self._round.deferred(len(self._round.calls) - 1))

    def finish(self) -> None:
        """The round is over: its results are needed."""
        if not self._round.calls:
            return
        done, self._round = self._round, self._begin()
        if self._new:
            self._agree(done.calls)
        done.results = self._exchange(done.calls)
        for later in done.later:
            later.compute()
        self.rounds.append(len(done.calls))

    def _begin(self) -> _Round:
        return _Round(self._dim.size, self.finish, self._live)

    def _look_ahead(self, key: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find what the call of this form will give, if that can be known."""
        foreseen = None
        if self._foresee is not None and key not in self._misjudged:
            foreseen = self._foresee(model, args, kwargs)
        if foreseen is None:
            self._new[key] = None
            return
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel() > 1)
        form, _ = _form_of(foreseen, lambda x: Expected(x, device))
        self._known[key] = self._new[key] = form

    def _agree(self, calls: list[_Call]) -> None:
        """Raise on all ranks if any foresaw something else than the others, or than what came."""
        failure = next((call.failure for call in calls if call.failure is not None), None)
        foreseen = [None if form is None else form.text for form in self._new.values()]
        try:
            check_consistent(failure or signature({"the form of a model's output": foreseen}), self._mesh)
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
        own = [tensor_bytes(x) for call in shared if call.owner == self._dim.index for x in call.leaves]
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
    return _form_of(found, lambda x: Expected(x.to("meta"), x.device))


def _form_of(found: Any, expected: Callable[[Tensor], Expected]) -> tuple[_Form, list[Tensor]]:
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


def _total_bytes(call: _Call) -> int:
    return sum(x.num_bytes for x in call.expected)
