"""Putting a cache on a model of one's own, and taking it off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.cache.attachment import ModelCallHook
from para_core.cache.block_cache import BlockCache
from para_core.cache.blocks import CachedBlocks
from para_core.cache.decision import Step
from para_core.cache.options import CacheOptions, options_of, rule_of, shows_options
from para_core.cache.report import CacheReport, rows_of
from para_core.distributed.mesh import sequence_mesh
from para_core.instance_patching import WrapperPriority, uncompiled, unwrap, wrap_method, wrapper
from para_core.plans.module_matching import parameters_of

Model = TypeVar("Model", bound=nn.Module)

_KEY = "cache of the model"


@shows_options()
def apply_cache(
    model: Model, blocks: CachedBlocks, *, mesh: DeviceMesh | ProcessGroup | None = None, **options: Any
) -> Model:
    """Skip blocks of ``model`` while the residual of its first one hardly changes; for a denoising loop of your own.

    Call :func:`reset_cache` before each generation. Branches of guidance are told apart by
    ``model.cache_context(name)`` where the model has it (diffusers' models do), else by ``blocks.conditions``. Calling this
    again takes effect; :func:`remove_cache` undoes it.

    Args:
        model: any module; what ``torch.compile`` makes of it later runs with the cache, too.
        blocks: its block stack.
        mesh: ranks that hold parts of one sequence and decide together. Left out: those of the plan that was applied, or of
            the mode around the call; what is compiled under a mode of yours needs it.
        **options: each of :class:`CacheOptions`, of which ``residual_diff_threshold`` is needed. What follows a schedule needs
            a pipeline.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an option does not fit, or the model has no such blocks.
    """
    module: Any = uncompiled(model)
    given = options_of("apply_cache", options)
    if given.needs_schedule:
        name = given.needs_schedule[0]
        raise ValueError(
            f"{name}={getattr(given, name)!r} was given, which reads pipe.scheduler; a model alone has no schedule. Leave it out, "
            "or use apply_cache_on_pipe(pipe, ...)."
        )
    remove_cache(model)
    cache = BlockCache(module, blocks, given, None if mesh is None else sequence_mesh(mesh))
    site = cache.attach()
    site.resident = cache
    caller = site.caller(_KEY)
    parameters = parameters_of(module)

    def run(call: Callable[..., Any], called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            cache.find_mesh()
            return call(called, *args, **kwargs)
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        return cache.run(partial(call, called, *args, **kwargs), arguments, lambda _: Step())

    caller.run, caller.cache = run, cache
    wrap_method(model, "__call__", caller.key, caller.around, order=WrapperPriority.CACHE)
    return model


def remove_cache(model: Model) -> Model:
    """Undo :func:`apply_cache`; returns ``model``, which is then what it was before."""
    for module in (model, uncompiled(model)):
        caller = _caller_of(module)
        cache = _cache_of(module)
        if caller is not None and cache is not None:
            cache.attach().remember(module)
            unwrap(module, caller.key)
            caller.free()
            cache.detach()
    return model


def reset_cache(model: nn.Module) -> None:
    """Forget all steps: the next call of ``model`` begins a generation."""
    cache = _required(model)
    cache.reset()
    cache.readings.clear()


def model_cache_report(model: nn.Module) -> CacheReport:
    """What the cache of ``model`` did since :func:`reset_cache`, in calls of ``model`` itself; of more than 4096 calls, in the last."""
    cache = _required(model)
    names = rule_of(cache.options.rule).name, cache.options.forecasts.name
    return CacheReport(rows_of(cache.readings), *names, dropped=cache.readings.dropped)


def held_bytes(model: nn.Module) -> int:
    """Bytes that the cache of ``model`` holds now, of all branches."""
    cache = _required(model)
    states = {id(state): state for state in (*cache.states.values(), cache.state)}
    return sum(x.numel() * x.element_size() for state in states.values() for x in state.tensors())


def cache_options(model: nn.Module) -> CacheOptions | None:
    """What :func:`apply_cache` was given for ``model``; None if it has no cache."""
    cache = _cache_of(model)
    return None if cache is None else cache.options


def _required(model: nn.Module) -> BlockCache:
    cache = _cache_of(model) or _cache_of(uncompiled(model))
    if cache is None:
        raise ValueError(f"this {type(model).__name__} has no cache: call apply_cache(model, ...) first.")
    return cache


def _cache_of(module: nn.Module) -> BlockCache | None:
    caller = _caller_of(module)
    found = None if caller is None else caller.cache
    return found if isinstance(found, BlockCache) else None


def _caller_of(module: nn.Module) -> ModelCallHook | None:
    found = getattr(wrapper(module, "__call__", f"{_KEY} 0"), "caller", None)
    return found if isinstance(found, ModelCallHook) else None
