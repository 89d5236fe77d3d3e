"""Running a diffusers pipeline, or its transformer, on several ranks."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.foreseen import foreseen_output
from para_core.adapters.mesh_choice import choose_mesh, default_guidance, number_of_heads
from para_core.adapters.models.supported import TRANSFORMERS, plan_for, supported, transformers_of, why_refused
from para_core.adapters.one_call import (
    random_state_of_first_rank,
    reasons_shared,
    require_same_call,
    require_same_inputs,
    set_timeout,
)
from para_core.adapters.refusals import unfit_guider, unfit_hook, unseen_attention
from para_core.cache.apply import cache_options
from para_core.guidance import Guidance
from para_core.instance import Order, original_class, uncompiled, unwrap, wrap_method, wrapper
from para_core.make_mesh import init_context_parallel_mesh, require_own_gpus
from para_core.mesh import GuidedMesh, SequenceMesh, guided_mesh, one_guided_rank
from para_core.plans.region import apply_plan, known_equal, plan_mesh, reattach_plan, remove_plan

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup
Pipeline = TypeVar("Pipeline")
Transformer = TypeVar("Transformer", bound=nn.Module)

_KEY = "parallel"
_GUIDANCE = "guidance"


def parallelize_pipe(
    pipe: Pipeline,
    *,
    mesh: Mesh | None = None,
    text: Text | None = None,
    timeout: timedelta | float | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
) -> Pipeline:
    """Generate each image of this one pipeline on all ranks of ``mesh``, exactly as on one.

    Every rank of the mesh calls the pipeline alike and gets the whole result. Calling this again with another mesh
    takes effect; :func:`unparallelize_pipe` undoes it. Other pipelines are not touched.

    Args:
        pipe: any diffusers pipeline on a supported transformer.
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (also a slice of a larger one), or a ProcessGroup. Ranks
            along a ``batch`` dim share the branches of guidance. Left out: all ranks, half of them for each branch where the
            pipeline guides by default, then Ulysses up to the number of heads, then the ring; one rank where
            ``WORLD_SIZE`` is unset or 1.
        text: ``"shard"`` shards the text tokens as those of the image are, ``"replicate"`` keeps all of them on every rank.
            Both are exact; left out: the faster one for this model.
        timeout: how long (seconds, if a number) the ranks of the mesh wait for one that does not answer, because it raised
            an exception of its own or died; set on the mesh's process groups. Then gloo raises, and NCCL ends the process. Left out:
            as it is.
        adapter: what is to be known of a transformer that is not supported, or instead of what is known here.
        assume_equal: do not compare arguments over the ranks once per call. Arguments that differ then give wrong results or a
            hang. Random numbers are still those of the first rank.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: the pipeline is not supported, or the mesh does not fit.
        RuntimeError: no ``mesh`` and no process group on several ranks; or two ranks of a mesh on NCCL have the same GPU.
    """
    unparallelize_pipe(pipe)
    transformers = _plans_of(pipe, adapter)
    guided = _guided_mesh(mesh, pipe)
    if guided.ranks > 1 and hasattr(pipe, "pag_applied_layers"):
        adapter = _of_perturbed(pipe, transformers["transformer"], adapter)
    for transformer in transformers.values():
        parallelize_transformer(transformer, mesh=guided, text=text, adapter=adapter, assume_equal=assume_equal)
    if guided.ranks == 1:
        return pipe
    if timeout is not None:
        set_timeout(guided, timeout)
    meshes = {name: plan_mesh(transformer) for name, transformer in transformers.items()}
    guidance = Guidance(guided.batch, foreseen_output)
    plans = [plan_for(transformer, adapter=adapter) for transformer in transformers.values()]
    apart = guided.batch.size > 1 and not any(plan is not None and plan.batched for plan in plans)

    signatures = {
        id(module): inspect.signature(original_class(module).forward)  # type: ignore[attr-defined]
        for module in transformers.values()
    }

    def share_out(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not guidance.active:
            return call(module, *args, **kwargs)
        # Here, for an error of the one rank that computes this call would leave the others waiting.
        signatures[id(uncompiled(module))].bind(module, *args, **kwargs)
        return guidance.call(module, partial(call, module), args, kwargs)

    def around(call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        guided.check_alive()
        problems = [
            _problem(pipe, name, transformer, meshes[name])
            or unfit_hook(transformer, guided.ranks, guided.sequence.ranks, f"pipe.{name}")
            for name, transformer in transformers.items()
        ]
        problems.append(unfit_guider(pipe, guided.ranks, guided.sequence.ranks))
        problem = next((problem for problem in problems if problem is not None), None)
        if not assume_equal:
            require_same_call(pipe, args, kwargs, guided, f"the {type(pipe).__name__}", problem)
        elif problem is not None:
            raise RuntimeError(problem)
        with ExitStack() as stack:
            token = stack.enter_context(random_state_of_first_rank(guided))
            for name, transformer in transformers.items():
                reattach_plan(transformer)
                stack.enter_context(known_equal(transformer))
                component = getattr(pipe, name)
                if apart and wrapper(component, "__call__", _GUIDANCE) is not share_out:
                    # Around what torch.compile made of it, if anything: a graph holds one call.
                    wrap_method(component, "__call__", _GUIDANCE, share_out, order=Order.GUIDANCE)
            stack.enter_context(reasons_shared(token))
            if apart:
                stack.enter_context(_warn_unguided(guidance, guided.batch.size, type(pipe).__name__))
                stack.enter_context(guidance.generation())
            return call(pipe, *args, **kwargs)

    around.mesh = guided  # type: ignore[attr-defined]
    wrap_method(pipe, "__call__", _KEY, around, order=Order.PARALLEL)
    return pipe


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """The ranks that run ``pipe``; None if it is not parallel."""
    found = getattr(wrapper(pipe, "__call__", _KEY), "mesh", None)
    return found if isinstance(found, GuidedMesh) else None


def _of_perturbed(pipe: Any, transformer: nn.Module, adapter: Adapter | None) -> Adapter:
    """Perturbed attention guidance takes the branches of a batch apart inside of the model: no rank has samples of its own."""
    if original_class(transformer).__name__ == "SD3Transformer2DModel":
        reason = (
            "its perturbed attention hides image tokens from each other by a mask that covers those of one rank only"
        )
        raise TypeError(_unsupported(pipe, reason, "Use the pipeline without perturbed attention. "))
    plan = plan_for(transformer, adapter=adapter)
    if plan is None:
        raise TypeError(_no_plan(pipe, transformer))
    return Adapter(original_class(transformer).__name__, type(pipe).__name__, replace(plan, batched={}))


@contextmanager
def _warn_unguided(guidance: Guidance, ranks: int, name: str) -> Iterator[None]:
    yield
    if guidance.rounds and max(guidance.rounds) == 1:
        warnings.warn(
            f"this call of the {name} had no branches of guidance for the {ranks} ranks along 'batch' to share: one computed "
            "what the others waited for. Guide, or give these ranks to the sequence (a mesh without max_batch_dim_size).",
            stacklevel=5,
        )


def _problem(pipe: Any, name: str, transformer: nn.Module, mesh: SequenceMesh | None) -> str | None:
    """What was done to a transformer of ``pipe`` since it was parallelized, if that makes it wrong to call it."""
    if uncompiled(getattr(pipe, name, None)) is not transformer:
        return (
            f"pipe.{name} is another one than when the pipe was parallelized, and would run on each rank alone. Call "
            "parallelize_pipe(pipe, mesh=...) again."
        )
    if plan_mesh(transformer) != mesh:
        return (
            f"pipe.{name} was given another mesh, or unparallelized, after the pipe was parallelized (through a pipe that "
            "shares it?). Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe)."
        )
    return None if mesh is None else unseen_attention(transformer, mesh.ranks, f"pipe.{name}")


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe`; returns ``pipe``, which is then what it was before."""
    for name in TRANSFORMERS:
        component = getattr(pipe, name, None)
        if isinstance(component, nn.Module):
            unwrap(component, _GUIDANCE)
            unwrap(uncompiled(component), _GUIDANCE)
            remove_plan(uncompiled(component))
    unwrap(pipe, _KEY)
    return pipe


def parallelize_transformer(
    transformer: Transformer,
    *,
    mesh: Mesh | GuidedMesh | None = None,
    text: Text | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
) -> Transformer:
    """Run this one transformer over ``mesh``: every rank gives it the same input and gets the whole output.

    For a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments alike on all ranks.
    In eager code, and where it was compiled in place, each call first compares a digest of its inputs over the ranks.

    Args:
        transformer: a supported diffusers transformer, compiled or not.
        mesh, text, adapter: as for :func:`parallelize_pipe`.
        assume_equal: do not compare. Hashing the inputs is most of what that costs: some 4 ms per MB.

    Returns:
        ``transformer``.
    """
    module = uncompiled(transformer)
    plan = plan_for(module, text, adapter)
    if plan is None:
        raise TypeError(_no_plan(module, module))
    guided = _guided_mesh(mesh, module)
    _require_one_device(module)

    def require_equal(given: Mapping[str, Any]) -> None:
        guided.check_alive()
        problem = unseen_attention(module, guided.sequence.ranks, "transformer")
        problem = problem or unfit_hook(module, guided.ranks, guided.sequence.ranks, "transformer")
        if assume_equal:
            if problem is not None:
                raise RuntimeError(problem)
            return
        options = cache_options(module)
        cached = {} if options is None else {"its cache": options.as_text()}
        require_same_inputs({**given, **cached}, guided, f"this {type(module).__name__}", problem)

    apply_plan(module, plan, guided.sequence, batch=guided.batch, require_equal=require_equal)
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer`; returns ``transformer``."""
    remove_plan(uncompiled(transformer))
    return transformer


def _plans_of(pipe: Any, adapter: Adapter | None = None) -> dict[str, nn.Module]:
    """The transformers of a pipeline by the name of the component; each has a plan."""
    transformers = transformers_of(pipe)
    if not transformers:
        raise TypeError(_unsupported(pipe, "it has no transformer"))
    for module in transformers.values():
        if plan_for(module, adapter=adapter) is None:
            raise TypeError(_no_plan(pipe, module))
    return transformers


def _unsupported(thing: Any, reason: str, way_out: str = "") -> str:
    return f"{original_class(thing).__name__} is not supported: {reason}. {way_out}Supported are {supported()}."


def _no_plan(thing: Any, module: nn.Module) -> str:
    name = original_class(module).__name__
    reason = why_refused(module)
    if reason is not None:
        way_out = "Give each rank prompts of its own instead. "
        return _unsupported(thing, f"{name} has no plan, for {reason}", way_out)
    way_out = (
        "What it shards and gathers can be said in some ten lines, a plan: parallelize_pipe(pipe, mesh=mesh, "
        f"adapter=Adapter(transformer={name!r}, pipelines=..., plan=Plan(...))). propose_plan finds most of them; "
        "docs/new_model.md shows how. "
    )
    return _unsupported(thing, f"there is no plan for {name}", way_out)


def _require_one_device(module: nn.Module) -> None:
    devices = {str(device) for device in (getattr(module, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"the transformer is spread over the devices {sorted(devices)} by its device_map; each rank needs a whole "
            "copy on one device. Load it without device_map, or with device_map={'': this rank's device}."
        )
    if getattr(module, "_parallel_config", None) is not None:
        raise ValueError(
            "the transformer already runs under diffusers' own enable_parallelism(config=...). Use one of the two: load "
            "it without parallel_config, and call parallelize_pipe(pipe, mesh=...) alone."
        )


def _guided_mesh(mesh: Mesh | GuidedMesh | None, owner: Any) -> GuidedMesh:
    if isinstance(mesh, GuidedMesh):
        return mesh
    if mesh is None:
        device_type = torch.device(getattr(owner, "_execution_device", None) or owner.device).type
        if not (dist.is_available() and dist.is_initialized()):
            world_size = os.environ.get("WORLD_SIZE", "1")
            if world_size != "1":
                raise RuntimeError(
                    f"WORLD_SIZE is {world_size}, but no process group is initialised. Call "
                    "torch.distributed.init_process_group() before parallelize_pipe(pipe)."
                )
            return one_guided_rank(device_type)
        return guided_mesh(_chosen_mesh(device_type, owner))
    guided = guided_mesh(mesh)
    require_own_gpus(mesh, guided)
    return guided


def _chosen_mesh(device_type: str, owner: Any) -> DeviceMesh:
    """For a pipeline or a transformer, over all ranks."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(
            module for name in TRANSFORMERS if (module := uncompiled(getattr(owner, name, None))) is not None
        )
        guidance = default_guidance(owner, transformer)
    choice = choose_mesh(dist.get_world_size(), number_of_heads(transformer), guidance)
    if dist.get_rank() == 0:
        logger.warning(
            "parallelize_pipe: no mesh given, using batch × ring × ulysses = %d × %d × %d (%s); "
            "mesh=init_context_parallel_mesh(%r, max_batch_dim_size=%d, max_ring_dim_size=%d) overrides it.",
            choice.batch,
            choice.ring,
            choice.ulysses,
            choice.reason,
            device_type,
            choice.batch,
            choice.ring,
        )
    return init_context_parallel_mesh(
        device_type,
        max_batch_dim_size=choice.batch,
        max_ring_dim_size=choice.ring,
        max_ulysses_dim_size=choice.ulysses,
    )
