"""CFG over ranks for pipelines that call their transformer once per CFG branch.

``features.py`` finds :data:`FEATURE`. Which rank computes a call, and how its output is sent, is in
``para_core/cfg/guidance.py``. Pipelines that concatenate the branches on the batch dim do not use this file:
the plan shards their samples. Tests: tests/adapters/test_guidance.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from para_core.adapters.agree.callbacks import wrap_callbacks
from para_core.adapters.cache.generation import PipelineCache, caching_of
from para_core.adapters.cfg.output_form import predict_output
from para_core.adapters.registry import adapter_for
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.cfg.guidance import Guidance
from para_core.distributed.mesh import MeshDim
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_during, slot_owner
from para_core.instance.slots import Slot
from para_core.lazy_tensors import materialize
from para_core.user_warnings import ParallelWarning, warn_user


class GuidedCalls(FeatureChange):
    """Distributor of the calls of a pipeline's transformers, one per CFG branch, over the ranks along ``batch``."""

    name = "distributing CFG branches"

    def __init__(self, request: ChangeRequest) -> None:
        self._transformers: Mapping[str, nn.Module] = request.transformers
        self._dim: MeshDim = request.mesh.batch
        self._guidance = Guidance(self._dim, predict_output)
        # The cache of the pipeline in the last generation; None if it had none.
        self._caching: PipelineCache | None = None
        # The components, compiled or not, that generations have wrapped.
        self._wrapped: WeakSet[nn.Module] = WeakSet()
        self._signatures = {
            id(module): inspect.signature(original_class(module).forward)  # type: ignore[attr-defined]
            for module in self._transformers.values()
        }
        # By module id, the name and value of the argument that marks a call which only fills the model's key
        # cache.
        self._fills: dict[int, tuple[str, str]] = {}
        for module in self._transformers.values():
            adapter = adapter_for(module, request.adapter)
            if adapter is not None and adapter.fills is not None:
                self._fills[id(module)] = adapter.fills

    def undo(self) -> None:
        """Empty the slots of all components that were wrapped, also of those that were replaced since."""
        for component in self._wrapped:
            if slot_owner(component, Slot.GUIDANCE, GuidedCalls) is self:
                empty_slot(component, Slot.GUIDANCE)

    @contextmanager
    def generation(self, pipe: Any, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Distribute the calls of the transformers in the ``with`` block, which runs one generation of
        ``pipe``.

        The components must be those of the request, because :meth:`_run_branch` looks them up by identity;
        one that was replaced since is refused before (``check_model_not_replaced``). Slots are restored at
        the end of the block.

        Yields ``kwargs`` with callbacks before which every rank gets the outputs of all branches.
        """
        self._caching = caching_of(pipe)
        with ExitStack() as stack:
            for name in self._transformers:
                # Wrap a compiled component itself and not the module inside it: its graph holds the call of
                # one CFG branch, and the branches are distributed outside the graph. A callback of another
                # pipeline that shares the component may make this call, so restore the slot of that pipeline.
                component = getattr(pipe, name)
                self._wrapped.add(component)
                branches = {"__call__": self._run_branch}
                stack.enter_context(fill_during(component, Slot.GUIDANCE, branches, owner=self))
            stack.enter_context(self._guidance.generation())
            yield stack.enter_context(wrap_callbacks(kwargs, Slot.GUIDANCE, self._run_callback))
        self._warn_unguided(type(pipe).__name__)

    def _run_callback(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Gather the step's outputs of all CFG branches on every rank, then run ``callback``, which may read them."""
        self._guidance.finish()
        return callback(*args, **kwargs)

    def _run_branch(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the call of one CFG branch. All ranks must make equal calls.

        One rank computes it, and the others get a lazy tensor, except for three kinds of calls, which every
        rank computes: outside of a generation, those that only fill a key cache, and those by which
        :class:`~para_core.cfg.guidance.Guidance` learns the form of the output.
        """
        if torch.compiler.is_compiling() or not self._guidance.active:
            return call(module, *args, **kwargs)
        if self._caching is not None:
            self._caching.announce(module, args, kwargs)
        # Every rank validates the arguments, although one may compute this call: if only that rank raised,
        # the others would wait for it.
        self._signatures[id(uncompiled(module))].bind(module, *args, **kwargs)
        fills = self._fills.get(id(uncompiled(module)))
        # Pipelines pass this argument by name.
        if fills is not None and kwargs.get(fills[0]) == fills[1]:
            # This call only fills the key cache, which each rank needs for the branch that it computes.
            args, kwargs = materialize((args, kwargs))
            return call(module, *args, **kwargs)
        return self._guidance.call(module, partial(call, module), args, kwargs)

    def _warn_unguided(self, name: str) -> None:
        """Warn if each round of the ended generation had one call.

        A round ends when the pipeline reads an output, so branches whose outputs it reads one by one are such
        rounds, too.
        """
        rounds = self._guidance.rounds
        if rounds and max(rounds) == 1:
            warn_user(
                f"this call of the {name} had no branches of guidance that could run at the same time: of "
                f"{self._dim.size} ranks along 'batch', one computed and the others waited. Use guidance, or give "
                "these ranks to the sequence (a mesh without max_batch_dim_size).",
                ParallelWarning,
            )


def distribute_branches(request: ChangeRequest) -> list[GuidedCalls]:
    """Return the change on a mesh with ``batch`` of a pipeline that calls its transformer once per branch."""
    if request.mesh.batch.size == 1 or not request.has_calls_per_branch:
        return []
    return [GuidedCalls(request)]


FEATURE = Feature(mesh_dim="batch", changes=distribute_branches)
