"""The wrapper of a parallel pipeline's ``__call__``: the same call on all ranks, with the same random numbers, and one error for all."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from para_core.adapters.applied import PARALLEL_PIPE, applied_mesh
from para_core.adapters.cache.generation import PipelineCache, caching_of
from para_core.adapters.compatibility import CompatibilityContext, When, reason_against
from para_core.adapters.consistency.agreed_callbacks import AgreedCallbacks
from para_core.adapters.consistency.arguments import require_same_call
from para_core.adapters.consistency.callbacks import around_callbacks
from para_core.adapters.consistency.failures import Place, places_of_all, reasons_shared
from para_core.adapters.consistency.loras import Loras
from para_core.adapters.consistency.rng import random_state_of_first_rank
from para_core.adapters.consistency.state import pipe_state
from para_core.adapters.parallel.cfg_output import foreseen_output
from para_core.adapters.parallel.session import ParallelSession
from para_core.adapters.registry import TRANSFORMERS
from para_core.adapters.rows.unet_rows import known_equal_unets
from para_core.adapters.weights.pipefusion import FusedPipe
from para_core.cfg.deferred import materialize
from para_core.cfg.guidance import Guidance
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import WrapperPriority, original_class, uncompiled, unwrap, wrap_method, wrapper
from para_core.plans.region import inputs_verified, reattach_plan
from para_core.weights.stages import known_equal_stages

_KEY = PARALLEL_PIPE
_GUIDANCE = "guidance"
_CALLBACK = "callback with results"
_AGREED = "callback that is compared"


class ParallelCall:
    """What goes around the calls of one pipeline on a mesh, and of its transformers.

    Args:
        transformers: by the name of the component; each has its plan.
        unets: by their paths; each runs on rows.
        apart: its branches of guidance are calls of their own, which are distributed over the ``batch`` mesh dim.
        assume_equal: arguments are not compared over the ranks.
        session: to which it belongs.

    Attributes:
        fused: PipeFusion on its transformers, if it runs on them.
    """

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        unets: Mapping[str, nn.Module],
        mesh: GuidedMesh,
        *,
        apart: bool,
        assume_equal: bool,
        session: ParallelSession,
    ) -> None:
        self.mesh, self.session = mesh, session
        self.fused: FusedPipe | None = None
        self._transformers, self._unets = transformers, unets
        self._applied: dict[str, SequenceMesh | None] = {}
        self._apart = apart
        self._assume_equal = assume_equal
        self._loras = Loras()
        self._caching: PipelineCache | None = None
        self._places: list[Place] = []  # of all ranks, once they have called together
        self._guidance = Guidance(mesh.batch, foreseen_output)
        self._signatures = {
            id(module): inspect.signature(original_class(module).forward)  # type: ignore[attr-defined]
            for module in transformers.values()
        }

    def put_around(self, pipe: Any) -> None:
        """Wrap ``__call__`` of ``pipe``, to whose models plans and rows are applied already."""
        models = {**self._transformers, **self._unets}
        self._applied = {name: applied_mesh(module) for name, module in models.items()}
        wrap_method(pipe, "__call__", _KEY, self._around, order=WrapperPriority.PARALLEL)

    def _around(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.mesh.check_alive()
        problem = reason_against(
            When.PARALLEL_CALL,
            *[
                CompatibilityContext(pipe, module, name, mesh=self.mesh, applied=self._applied[name])
                for name, module in {**self._transformers, **self._unets}.items()
            ],
        )
        if not self._assume_equal:
            state = partial(self._state, pipe)
            require_same_call(pipe, args, kwargs, self.mesh, f"the {type(pipe).__name__}", state, problem)
        elif problem is not None:
            raise RuntimeError(problem)
        self._places = self._places or places_of_all(self.mesh)
        self._caching = caching_of(pipe)
        with ExitStack() as stack:
            token = stack.enter_context(random_state_of_first_rank(self.mesh))
            for name, module in self._transformers.items():
                reattach_plan(module)
                stack.enter_context(inputs_verified(module))
                stack.enter_context(known_equal_stages(module))
                component = getattr(pipe, name)
                if self._apart and wrapper(component, "__call__", _GUIDANCE) != self._share_out:
                    # Around what torch.compile made of it, if anything: a graph holds one call.
                    wrap_method(component, "__call__", _GUIDANCE, self._share_out, order=WrapperPriority.GUIDANCE)
            stack.enter_context(known_equal_unets(self._unets.values()))
            stack.enter_context(reasons_shared(token, self._places))
            if self.fused is not None:
                # Its ranks come to a step at different times: a callback is not agreed upon, which would make them wait.
                stack.enter_context(self.fused.generation(pipe))
            elif not self._assume_equal:
                agreed = AgreedCallbacks(pipe, self.mesh, self._loras)
                kwargs = stack.enter_context(
                    around_callbacks(kwargs, _AGREED, agreed.run, order=WrapperPriority.GUIDANCE)
                )
            if self._apart:
                stack.enter_context(self._warn_unguided(type(pipe).__name__))
                stack.enter_context(self._guidance.generation())
                kwargs = stack.enter_context(
                    around_callbacks(kwargs, _CALLBACK, self._with_results, order=WrapperPriority.GUIDANCE)
                )
            result = materialize(call(pipe, *args, **kwargs))
        return materialize(result)

    def _state(self, pipe: Any, decodes: bool) -> Mapping[str, Any]:
        """Return the state of ``pipe`` that must be equal on all ranks."""
        caching = caching_of(pipe)
        cache = None if caching is None else {name: cache.as_text() for name, cache in caching.caches.items()}
        return pipe_state(pipe, self._loras, decodes=decodes, cache=cache)

    def _with_results(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A callback after the results of its step are on every rank: it may look at them on one rank alone."""
        self._guidance.finish()
        return callback(*args, **kwargs)

    def _share_out(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._guidance.active:
            return call(module, *args, **kwargs)
        if self._caching is not None:
            self._caching.announce(module, args, kwargs)
        # Here, for an error of the one rank that computes this call would leave the others waiting.
        self._signatures[id(uncompiled(module))].bind(module, *args, **kwargs)
        return self._guidance.call(module, partial(call, module), args, kwargs)

    @contextmanager
    def _warn_unguided(self, name: str) -> Iterator[None]:
        yield
        rounds = self._guidance.rounds
        if rounds and max(rounds) == 1:
            warnings.warn(
                f"this call of the {name} had no branches of guidance for the {self.mesh.batch.size} ranks along 'batch' to share: "
                "one computed what the others waited for. Guide, or give these ranks to the sequence (a mesh without "
                "max_batch_dim_size).",
                stacklevel=6,
            )


def parallel_call(pipe: Any) -> ParallelCall | None:
    """What :meth:`ParallelCall.put_around` put around ``pipe``, if it did."""
    found = getattr(wrapper(pipe, "__call__", _KEY), "__self__", None)
    return found if isinstance(found, ParallelCall) else None


def remove_parallel_call(pipe: Any) -> None:
    """Take away what :class:`ParallelCall` put around ``pipe`` and its transformers."""
    for name in TRANSFORMERS:
        component = getattr(pipe, name, None)
        for module in (component, uncompiled(component)):
            if isinstance(module, nn.Module):
                unwrap(module, _GUIDANCE)
    unwrap(pipe, _KEY)
