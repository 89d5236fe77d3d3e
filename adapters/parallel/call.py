"""Wrapper of a parallel pipeline's ``__call__``: keeps arguments, random numbers and errors equal on all ranks.

``resolve.py`` makes it as a part of the session, and ``parallelize.py`` finds and removes it. The plans of
the models are not applied here (``transformer.py``); the comparisons themselves are in ``adapters/agree``.
Tests: tests/adapters/agree/test_arguments.py, tests/adapters/agree/test_state.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from para_core import version
from para_core.adapters.agree.arguments import agree_on_values, difference_of_pipeline_calls
from para_core.adapters.agree.callbacks import CheckedCallbacks, wrap_callbacks
from para_core.adapters.agree.failures import Places, places_of_all, share_reasons
from para_core.adapters.agree.loras import describe_loras, models_of
from para_core.adapters.agree.rng import share_random_state
from para_core.adapters.cache.generation import caching_of
from para_core.adapters.compatibility.checks import CheckedModel, check_parallel_call
from para_core.adapters.denoisers import denoiser_run_of, kind_of
from para_core.adapters.inspect.attention_names import describe_attention, translated_attention
from para_core.adapters.parallel.scheduled_attention import ScheduledAttention
from para_core.adapters.parallel.session import ParallelSession
from para_core.adapters.registry import applied_mesh, transformers_of
from para_core.adapters.weights.feature import FeatureChange
from para_core.call_checks import make_check
from para_core.distributed.agreed_inputs import assume_agreed
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, empty_slots, fill_during, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.lazy_tensors import materialize
from para_core.plans.region import region_of


class ParallelCall:
    """Wrapper of ``__call__`` of one pipeline on a mesh.

    Args:
        transformers: Transformers by component name. A parallel plan is applied to each.
        unets: The other denoisers (UNets, ControlNets) by path in the pipeline. The rows of their images are
            sharded.
        mesh: The ranks that run the pipeline.
        assume_equal: Whether to skip the comparison of arguments between ranks.
        session: The session that attached this handler; :func:`unparallelize_pipe` stops it.
        verify: Whether to compare calls of the transformers with the unmodified ones.
        changes: The changes that features make; :meth:`FeatureChange.generation` of each runs around a
            generation.
    """

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        unets: Mapping[str, nn.Module],
        mesh: GuidedMesh,
        *,
        assume_equal: bool,
        session: ParallelSession,
        verify: bool = False,
        changes: Sequence[FeatureChange] = (),
    ) -> None:
        self.mesh, self.session, self.changes = mesh, session, changes
        # By component name. Without verify=True there are none.
        self._verifications = {}
        if verify:
            self._verifications = {name: make_check("verify") for name in transformers}
        # The components, compiled or not, whose calls are verified. Their slots stay filled after a
        # generation (fill_during), until unverify() empties them.
        self._verified: WeakSet[nn.Module] = WeakSet()
        # Set by resolve.py, before attach(), if ``backend`` is an AttentionSchedule.
        self.scheduled: ScheduledAttention | None = None
        self._transformers, self._unets = transformers, unets
        # The mesh that each model had in attach(), by name or path; None if no plan is applied to it.
        self._applied: dict[str, SequenceMesh | None] = {}
        self._assume_equal = assume_equal
        # Process and host of each rank, for error messages. The ranks exchange them in the first call, which
        # is the first one on all of them, because they made this object together.
        self._places: Places = {}

    def attach(self, pipe: Any) -> None:
        """Wrap ``__call__`` of ``pipe``. Call it after the models were parallelized.

        Records the meshes of the models, so that each call can check that they have not been changed since.
        """
        models = {**self._transformers, **self._unets}
        self._applied = {name: applied_mesh(module) for name, module in models.items()}
        self.wrap(pipe)

    def unverify(self) -> None:
        """Empty the slots through which ``verify=True`` compares calls, also of components replaced since."""
        empty_slots(self._verified, Slot.VERIFIED)

    def wrap(self, pipe: Any) -> None:
        """Wrap ``__call__`` of ``pipe``, for the first time or again after a failed undo. Records no meshes."""
        fill_slot(pipe, Slot.PARALLEL_PIPE, {"__call__": self._run}, owner=self)

    def _run(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one generation. Collective: every exchange here must be reached by all ranks, in this order.

        From :func:`agree_on_values` on, all ranks have equal arguments and state, so what follows decides
        equally on all of them, and the models need not compare their inputs again (:func:`assume_agreed`).
        """
        self.mesh.check_alive()
        models = {**self._transformers, **self._unets}
        check = partial(
            check_parallel_call,
            [
                CheckedModel(pipe, module, name, applied=self._applied[name], kind=kind_of(module))
                for name, module in models.items()
            ],
            self.mesh,
        )
        if self._assume_equal:
            check()
        else:
            values, name = partial(self._arguments_and_state, pipe, args, kwargs), type(pipe).__name__
            agree_on_values(
                values, self.mesh, f"the {name}", check, partial(difference_of_pipeline_calls, name)
            )
        self._places = self._places or places_of_all(self.mesh)
        checked: CheckedCallbacks | None = None
        with ExitStack() as stack:
            token = stack.enter_context(share_random_state(self.mesh))
            stack.enter_context(share_reasons(token, self._places))
            self._prepare_models(pipe, stack)
            overlaps_steps = any(change.overlaps_steps for change in self.changes)
            if not (self._assume_equal or overlaps_steps):
                checked = CheckedCallbacks(pipe, self.mesh)
                kwargs = stack.enter_context(wrap_callbacks(kwargs, Slot.CHECKED_CALLBACK, checked.run))
            if self.scheduled is not None:
                kwargs = stack.enter_context(self.scheduled.generation(pipe, kwargs))
            for change in self.changes:
                kwargs = stack.enter_context(change.generation(pipe, kwargs))
            result = materialize(call(pipe, *args, **kwargs))
            if checked is not None:
                checked.finish()
        return result

    def _prepare_models(self, pipe: Any, stack: ExitStack) -> None:
        """Make the models of ``pipe`` ready for one generation. ``stack`` undoes what does not outlive it."""
        for name, module in self._transformers.items():
            region = region_of(module)
            if region is not None:
                # Attach the plan's hooks again, because loading a LoRA may have replaced submodules. A call
                # that torch.compile traces does not do it itself.
                region.attach(module)
                region.check_new_code(module)
            stack.enter_context(assume_agreed([region]))
            stack.enter_context(translated_attention(module))
            if name in self._verifications:
                # Wrap a compiled component, not the module inside it: the comparison must not be traced.
                component, verification = getattr(pipe, name), self._verifications[name]
                self._verified.add(component)
                stack.enter_context(fill_during(component, Slot.VERIFIED, {"__call__": verification}))
        stack.enter_context(assume_agreed(map(denoiser_run_of, self._unets.values())))

    def _arguments_and_state(self, pipe: Any, args: Any, kwargs: Any) -> Mapping[str, Any]:
        """Return the arguments of a call and the state of ``pipe`` that all ranks must share, by name.

        Of the models, the state has the dtypes of the denoisers and, unless the call returns latents, of the
        VAE. It has no text encoders: a call may pass embeddings instead.
        """
        bound = inspect.signature(original_class(pipe).__call__).bind(pipe, *args, **kwargs).arguments
        bound.pop("self", None)
        state: dict[str, Any] = {**bound.pop("kwargs", {}), **bound}
        for name in ("scheduler", "guider"):
            part = getattr(pipe, name, None)
            if part is not None:
                # Leave out internal values, whose names begin with an underscore: some are lists in no fixed
                # order.
                config = getattr(part, "config", {})
                settings = {key: value for key, value in config.items() if not key.startswith("_")}
                state[f"pipe.{name}"] = {"class": type(part).__name__, **settings}
        caching = caching_of(pipe)
        if caching is not None:
            for name, options in caching.caches.items():
                state |= {
                    f"{option} of the cache of {name}": text for option, text in options.as_text().items()
                }
        for name, module in transformers_of(pipe).items():
            state |= {f"{option} of {name}": value for option, value in describe_attention(module).items()}
        # Of the ControlNets of one pipeline, "controlnet.nets.0", the component "controlnet" has the dtypes.
        names = {*transformers_of(pipe), *[path.partition(".")[0] for path in self._unets]}
        if state.get("output_type") != "latent":
            names.add("vae")
        for name, model in models_of(pipe):
            dtypes = None
            if name in names:
                dtypes = {str(x.dtype).removeprefix("torch.") for x in model.parameters()}
            if dtypes:
                state[f"dtype of pipe.{name}"] = ", ".join(sorted(dtypes))
        if self.scheduled is not None:
            schedule = asdict(self.scheduled.schedule)
            state |= {f"{name} of the schedule of attention": str(value) for name, value in schedule.items()}
        versions = {
            "version of para_core": version.version_and_sources(),
            "versions of packages": _versions(),
        }
        return {**state, **describe_loras(pipe), **versions}


@cache
def _versions() -> str:
    """Return the names and versions of torch and diffusers, without the names of their builds."""
    packages: list[Any] = [torch]
    # diffusers may be missing, because a user's own pipeline can run without it.
    with suppress(ImportError):
        import diffusers

        packages.append(diffusers)
    # Drop the part after a plus, such as +cu128: it names the build, which may differ between machines.
    return ", ".join(f"{package.__name__} {package.__version__.partition('+')[0]}" for package in packages)


def parallel_call(pipe: Any) -> ParallelCall | None:
    """Return the handler that :meth:`ParallelCall.attach` attached to ``pipe``; None if ``pipe`` is not parallel."""
    return slot_owner(pipe, Slot.PARALLEL_PIPE, ParallelCall)


def remove_parallel_call(pipe: Any) -> None:
    """Empty the slots that :class:`ParallelCall` has filled on ``pipe`` and its transformers."""
    call = parallel_call(pipe)
    if call is not None:
        call.unverify()
        if call.scheduled is not None:
            call.scheduled.remove()
    empty_slot(pipe, Slot.PARALLEL_PIPE)
