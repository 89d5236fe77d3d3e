"""Rounds of model calls: the calls between two exchanges, and the lazy tensors that get their data at the end.

Which rank computes a call, and the exchange, are in :mod:`.guidance`, which fills ``calls`` and sets
``is_over``. Tests: tests/cfg/test_guidance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.lazy_tensors import (
    Expected,
    LazyTensor,
    LiveTensors,
    copy_ordinary_tensors,
    materialize,
    run_without_data,
)
from para_core.torch_internals import pytree, schema_of


@dataclass
class ModelCall:
    """One model call of a round, computed by the ranks with index ``owner`` along the mesh dim, or by all if
    None.

    ``leaves`` are the output's tensors, empty until the exchange if this rank does not compute the call, and
    ``failure`` is the exception that this rank raised while computing it.
    """

    owner: int | None
    expected: list[Expected]
    leaves: list[Tensor] = field(default_factory=list)
    failure: Exception | None = None

    def leaf(self, index: int) -> Tensor:
        """Return the output's tensor ``index``. Call it after the exchange, which replaces ``leaves``."""
        return self.leaves[index]


@dataclass
class Round:
    """The model calls between two exchanges, distributed over ``size`` ranks.

    ``finish`` ends the round: it gives all ranks the results of its model calls. That is a collective call.
    """

    size: int
    finish: Callable[[], None]
    live: LiveTensors
    calls: list[ModelCall] = field(default_factory=list)
    # Whether the exchange has taken place, so that each call has its output.
    is_over: bool = False
    # Operator calls on lazy tensors, postponed to the end of the round, in the order of the calls. They run
    # before anything else can read or change these tensors: an operator that changes one in place ends the
    # round first.
    later: list[Callable[[], None]] = field(default_factory=list)

    @property
    def waits_for_more(self) -> bool:
        """Whether fewer model calls than ranks are in this round, so that some ranks have nothing to compute yet."""
        return len(self.calls) < self.size


class RoundOutput:
    """The source of a lazy tensor that gets its data when ``round`` ends. ``get`` returns the data then.

    An operator that needs the data earlier ends the round.
    """

    def __init__(self, round: Round, get: Callable[[], Any]) -> None:
        self.round = round
        self._get = get
        self.live = round.live

    @property
    def is_ready(self) -> bool:
        return self.round.is_over

    def value(self) -> Tensor:
        """Return the data. If the round has not ended, end it, which is a collective call."""
        if not self.round.is_over:
            self.round.finish()
        data: Tensor = self._get()
        return data

    def postpone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Postpone a call of the operator ``func`` to the end of the round, and return its results as lazy
        tensors.

        Return None and do nothing if the call cannot wait, if the shapes of its results depend on data, or if
        some result is not a tensor.
        """
        if not self._can_wait(func, args, kwargs):
            return None
        outputs = run_without_data(func, args, kwargs)
        leaves, spec = pytree.tree_flatten(outputs)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, LazyTensor))
        args, kwargs = copy_ordinary_tensors((args, kwargs))
        results: list[Any] = []

        def compute() -> None:
            results.extend(pytree.tree_leaves(func(*materialize(args), **materialize(kwargs))))

        self.round.later.append(compute)
        lazy = []
        for index, leaf in enumerate(leaves):
            source = RoundOutput(self.round, partial(results.__getitem__, index))
            lazy.append(LazyTensor.make(source, Expected(leaf, device)))
        return pytree.tree_unflatten(lazy, spec)

    def _can_wait(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the call ``func(*args, **kwargs)``, which has lazy arguments, should wait for the end of
        the round.

        The operator must neither draw random numbers nor change its arguments, and must run on one device. If
        some arguments are ordinary tensors, it must also be pointwise (others may take weights, which should
        not be copied), and the round must have fewer model calls than ranks, so that some ranks still have
        nothing to compute.
        """
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ordinary = [x for x in tensors if not isinstance(x, LazyTensor)]
        devices = {x.device for x in tensors if isinstance(x, LazyTensor)}
        if len(devices) != 1 or kwargs.get("device") not in (None, *devices):
            return False
        if not all(
            type(x) in (Tensor, nn.Parameter) and (x.device in devices or x.ndim == 0) for x in ordinary
        ):
            return False
        if ordinary and not (torch.Tag.pointwise in func.tags and self.round.waits_for_more):
            return False
        # The order of random draws must be that of a single device.
        return not schema_of(func).is_mutable and torch.Tag.nondeterministic_seeded not in func.tags
