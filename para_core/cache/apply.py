"""Public functions for First Block Cache on a model without a pipeline: apply, reset and remove it, name
branches, and look up its options.

Pipelines have ``apply_cache_on_pipe`` in ``adapters/cache/pipeline.py`` instead. What a call does is in
:mod:`.block_cache`. Tests: tests/cache/test_state.py, tests/cache/test_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.cache.attachment import host_of
from para_core.cache.block_cache import BlockCache
from para_core.cache.blocks import CachedBlocks
from para_core.cache.options import CacheOptions, options_of
from para_core.declared_options import shows_options
from para_core.distributed.mesh import sequence_mesh
from para_core.instance.modules import uncompiled
from para_core.instance.record import empty_slot, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.plans.module_matching import parameters_of

Model = TypeVar("Model", bound=nn.Module)


@shows_options(CacheOptions)
def apply_cache(
    model: Model, blocks: CachedBlocks, *, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any
) -> Model:
    """Apply First Block Cache to a model that you call in your own denoising loop. Not exact.

    The transformer blocks after the first are skipped in steps in which the first-block residual hardly
    changes. Call :func:`reset_cache` before each generation. A call inside ``with cache_context(model,
    name)`` belongs to the CFG branch ``name``. Other calls are assigned to branches by ``blocks.conditions``.
    Calls of one step that their arguments do not tell apart are computed, with a warning. Calling this
    function again replaces the settings; :func:`remove_cache` removes the cache.

    Args:
        model (`nn.Module`): The model. It may be compiled before or after this call.
        blocks (`CachedBlocks`): The description of the model's block stack.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that hold parts of one sequence, which
            decide together. Defaults to the mesh of the plan that is applied to the model, or of the mode
            around the call. Required if you compile the model inside your own mode: without it each rank
            would decide from its own tokens, and ranks that decide differently would wait for each other.
        **options: The options of :class:`CacheOptions`. The threshold is required. Options that need a
            pipeline's schedule, such as ``start``, are refused.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: An option is unknown or has a wrong type, the threshold is missing, or ``mesh`` is neither
            a `DeviceMesh` nor a `ProcessGroup`.
        ValueError: An option is out of range, excludes another one, needs a schedule, or leaves no block to
            skip; the model lacks the blocks or arguments that ``blocks`` describes, or has one of diffusers'
            own caches; ``mesh`` has neither a ``ring`` nor a ``ulysses`` dim, has a dim that is unknown, or
            does not contain this rank.
        RuntimeError: The process groups of ``mesh`` were destroyed, or a call of the model is running with a
            cache of a pipeline that skips other blocks; in the latter case an earlier cache of this function
            is removed.
    """
    module: Any = uncompiled(model)
    settings = options_of("apply_cache", options)
    if settings.needs_schedule:
        name = settings.needs_schedule[0]
        raise ValueError(
            f"{name}={getattr(settings, name)!r} needs the schedule of a pipeline, and a model alone has none. Leave "
            "it out, or use apply_cache_on_pipe(pipe, ...)."
        )
    ranks = None
    if mesh is not None:
        ranks = sequence_mesh(mesh)
    cache = BlockCache(module, blocks, settings, ranks)
    remove_cache(model)
    host = cache.attach()
    host.resident = cache
    cache.applied_to = model
    parameters = parameters_of(module)

    def run(call: Callable[..., Any], called: Any, /, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if torch.compiler.is_compiling():
            cache.look_up_plan()
            # The digest of a call sums over its arguments in order, so all calls need one. Dynamo 2.13 cannot
            # sort the names.
            cache.traced.enter({name: arguments[name] for name in parameters if name in arguments})
            return call(called, *args, **kwargs)
        return cache.run(partial(call, called, *args, **kwargs), arguments)

    fill_slot(model, Slot.CACHE, {"__call__": run}, owner=cache)
    return model


def remove_cache(model: Model) -> Model:
    """Undo :func:`apply_cache`, if it was called, and return ``model``.

    ``model`` may be the module, or what ``torch.compile`` made of it, whichever of them :func:`apply_cache` got.
    """
    cache = _find_cache(model)
    if cache is not None:
        empty_slot(cache.applied_to, Slot.CACHE)
        cache.detach()
    return model


def reset_cache(model: nn.Module) -> None:
    """Drop the stored residuals and the report of ``model``. Call it before each generation.

    Raises:
        ValueError: :func:`apply_cache` has not been called for the model. A pipeline resets its own cache.
    """
    require_cache(model).begin_generation()


@contextmanager
def cache_context(model: nn.Module, name: str) -> Iterator[None]:
    """Name the CFG branch of the calls of ``model`` inside the ``with`` block.

    Needed if the arguments of a model do not tell its branches apart, or if it is called for several tiles or
    images in turn: each call of a step needs another name, and keeps it from step to step. With more than 8
    names in a step all calls are computed. Models of diffusers with ``CacheMixin`` have a method
    ``cache_context(name)``, which does the same.

    Raises:
        ValueError: No cache uses ``model``, neither one of :func:`apply_cache` nor one of a pipeline
            (``apply_cache_on_pipe``).
    """
    host = host_of(uncompiled(model))
    if host is None:
        raise _no_cache(model)
    with host.in_branch(name):
        yield


def cache_options(model: nn.Module) -> CacheOptions | None:
    """Return the options of the cache that :func:`apply_cache` attached to this object; None if there is
    none.

    A module and what ``torch.compile`` made of it are two objects here, unlike in :func:`require_cache`:
    ranks call this function at each call of a transformer, and reading one slot of this object is all that
    it costs.
    """
    cache = slot_owner(model, Slot.CACHE, BlockCache)
    if cache is None:
        return None
    return cache.options


def require_cache(model: nn.Module) -> BlockCache:
    """Return the cache of :func:`apply_cache` on ``model``, the module or what ``torch.compile`` made of it.

    Raises:
        ValueError: The model has no cache.
    """
    cache = _find_cache(model)
    if cache is None:
        raise _no_cache(model)
    return cache


def _no_cache(model: nn.Module) -> ValueError:
    """Return (not raise) the error that ``model`` has no cache."""
    return ValueError(f"this {type(model).__name__} has no cache: call apply_cache(model, ...) first.")


def _find_cache(model: nn.Module) -> BlockCache | None:
    """Return the cache of :func:`apply_cache` on the module, whichever object of it ``model`` is; None without one."""
    # Only the hooks know it: the slot is on the object that apply_cache got.
    host = host_of(uncompiled(model))
    if host is None:
        return None
    return host.resident
