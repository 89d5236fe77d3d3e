"""Running a diffusers pipeline, or its transformer, on several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.adapter import Text
from para_core.adapters.call_agreement import require_same_call, require_same_inputs
from para_core.adapters.supported import plan_for, supported
from para_core.collectives import broadcast_bytes
from para_core.instance import original_class, unwrap, wrap_method
from para_core.mesh import SequenceMesh, batch_dim_size, init_context_parallel_mesh, one_rank, sequence_mesh
from para_core.region import apply_plan, known_equal, plan_mesh, reattach_plan, remove_plan

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup
Pipeline = TypeVar("Pipeline")
Transformer = TypeVar("Transformer", bound=nn.Module)

_KEY = "parallel"
# Components that denoise; Wan 2.2 has one for each half of the steps.
_TRANSFORMERS = ("transformer", "transformer_2")


def parallelize_pipe(pipe: Pipeline, *, mesh: Mesh | None = None, text: Text | None = None) -> Pipeline:
    """Draw each picture of this one pipeline on all ranks of ``mesh``, exactly as on one.

    Every rank of the mesh calls the pipeline alike and gets the whole result. Calling this again with another mesh
    takes effect; :func:`unparallelize_pipe` undoes it. Other pipelines are not touched.

    Args:
        pipe: any diffusers pipeline on a supported transformer.
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (also a slice of a larger one), or a ProcessGroup. Left
            out: all ranks, shared out by :func:`init_context_parallel_mesh`; one rank where ``WORLD_SIZE`` is unset or 1.
        text: ``"shard"`` cuts the text tokens as those of the image are, ``"replicate"`` keeps all of them on every rank.
            Both are exact; left out: the faster one for this model.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: the pipeline is not supported, or the mesh does not fit.
        RuntimeError: no ``mesh`` and no process group on several ranks.
    """
    transformers = _transformers_of(pipe)
    sequence = _sequence_mesh(mesh, pipe)
    for transformer in transformers.values():
        parallelize_transformer(transformer, mesh=sequence, text=text)
    if sequence.ranks == 1:
        unwrap(pipe, _KEY)
        return pipe

    def around(pipe: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sequence.check_alive()
        problems = [_problem(pipe, name, transformer, sequence) for name, transformer in transformers.items()]
        problem = next((problem for problem in problems if problem is not None), None)
        require_same_call(call, (pipe, *args), kwargs, sequence, f"the {type(pipe).__name__}", problem)
        with ExitStack() as stack:
            stack.enter_context(_random_state_of_first_rank(sequence))
            for transformer in transformers.values():
                reattach_plan(transformer)
                stack.enter_context(known_equal(transformer))
            stack.enter_context(_named_timeouts())
            return call(pipe, *args, **kwargs)

    wrap_method(pipe, "__call__", _KEY, around)
    return pipe


def _problem(pipe: Any, name: str, transformer: nn.Module, mesh: SequenceMesh) -> str | None:
    """What was done to a transformer of ``pipe`` since it was parallelized, if that makes it wrong to call it."""
    if _unwrapped(getattr(pipe, name, None)) is not transformer:
        return (
            f"pipe.{name} is another one than when the pipe was parallelized, and would run on each rank alone. Call "
            "parallelize_pipe(pipe, mesh=...) again."
        )
    if plan_mesh(transformer) != mesh:
        return (
            f"pipe.{name} was given another mesh, or unparallelized, after the pipe was parallelized (through a pipe that "
            "shares it?). Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe)."
        )
    return None


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe`; returns ``pipe``, which is then what it was before."""
    for name in _TRANSFORMERS:
        transformer = _unwrapped(getattr(pipe, name, None))
        if isinstance(transformer, nn.Module):
            remove_plan(transformer)
    unwrap(pipe, _KEY)
    return pipe


def parallelize_transformer(
    transformer: Transformer, *, mesh: Mesh | SequenceMesh | None = None, text: Text | None = None
) -> Transformer:
    """Run this one transformer over ``mesh``: every rank gives it the same input and gets the whole output.

    For a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments alike on all ranks.
    In eager code, and where it was compiled in place, each call first compares a digest of its inputs over the ranks.

    Args:
        transformer: a supported diffusers transformer, compiled or not.
        mesh, text: as for :func:`parallelize_pipe`.

    Returns:
        ``transformer``.
    """
    module = _unwrapped(transformer)
    plan = plan_for(module, text)
    if plan is None:
        raise TypeError(_unsupported(module, f"there is no plan for {type(module).__name__}"))
    sequence = _sequence_mesh(mesh, module)
    _require_one_device(module)

    def require_equal(given: Mapping[str, Any]) -> None:
        sequence.check_alive()
        require_same_inputs(given, sequence, f"this {type(module).__name__}")

    apply_plan(module, plan, sequence, require_equal=require_equal)
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer`; returns ``transformer``."""
    remove_plan(_unwrapped(transformer))
    return transformer


def _unwrapped(module: Any) -> Any:
    """The module inside what ``torch.compile`` made of it."""
    return getattr(module, "_orig_mod", module)


def _transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """By the name of the component."""
    found = {name: _unwrapped(getattr(pipe, name, None)) for name in _TRANSFORMERS}
    transformers = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not transformers:
        raise TypeError(_unsupported(pipe, "it has no transformer"))
    for module in transformers.values():
        if plan_for(module) is None:
            raise TypeError(_unsupported(pipe, f"there is no plan for {type(module).__name__}"))
    return transformers


def _unsupported(thing: Any, reason: str) -> str:
    return (
        f"{original_class(thing).__name__} is not supported: {reason}. Supported are {supported()}. Any model whose tokens you "
        "can cut runs in parallel by hand:\n"
        "    with UnifiedAttnMode(mesh) as cp:\n"
        "        y = cp.gather(model(cp.shard(x, dim=1)), dim=1)"
    )


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


def _sequence_mesh(mesh: Mesh | SequenceMesh | None, owner: Any) -> SequenceMesh:
    if isinstance(mesh, SequenceMesh):
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
            return one_rank(device_type)
        mesh = init_context_parallel_mesh(device_type)
        if dist.get_rank() == 0:
            logger.warning(
                "parallelize_pipe: no mesh given, using ring × ulysses = %d × %d; "
                "mesh=init_context_parallel_mesh(%r, max_ring_dim_size=...) overrides it.",
                *(mesh[name].size() for name in ("ring", "ulysses")),
                device_type,
            )
    if batch_dim_size(mesh) > 1:
        raise ValueError(
            f"the mesh has a 'batch' dim of {batch_dim_size(mesh)} ranks; guidance does not run in parallel yet. Give those "
            "ranks to the sequence (init_context_parallel_mesh without max_batch_dim_size), or pass mesh['ring', 'ulysses']."
        )
    return sequence_mesh(mesh)


@contextmanager
def _random_state_of_first_rank(mesh: SequenceMesh) -> Iterator[None]:
    """Inside, the default generators continue those of the mesh's first rank; afterwards each rank has its own again.

    The first rank's move on, as if it had drawn alone.
    """
    # Whatever the mesh says: diffusers draws on the pipeline's device, and a gloo group also serves accelerators.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_module = None if accelerator is None else torch.get_device_module(accelerator)
    own = [torch.get_rng_state()] + ([device_module.get_rng_state()] if device_module else [])
    shared = [broadcast_bytes(state, mesh) for state in own]
    torch.set_rng_state(shared[0])
    if device_module:
        device_module.set_rng_state(shared[1])
    try:
        yield
    finally:
        if mesh.rank != 0:
            torch.set_rng_state(own[0])
            if device_module:
                device_module.set_rng_state(own[1])


@contextmanager
def _named_timeouts() -> Iterator[None]:
    """Say in plain words what a collective's time-out means here."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if any(sign in text for sign in ("timed out", "timeout", "connection closed", "connection reset")):
            raise RuntimeError(
                "another rank stopped answering in the middle of this call: it raised an exception of its own (its log has "
                "the reason), was interrupted, or died. This rank gave up waiting."
            ) from error
        raise
