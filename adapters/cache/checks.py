"""Checks before a cache is applied to a pipeline or transformer, and before each cached call.

``pipeline.py`` calls :func:`check_cache`, and ``generation.py`` :func:`check_cached_call`. The values of the
options are checked in ``para_core/cache/options.py``. Tests: tests/adapters/compatibility/test_checks.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.closest_names import closest_cached
from para_core.adapters.compatibility.checks import CheckedModel
from para_core.adapters.denoisers import kind_of
from para_core.adapters.model_checks import check_adapter_type, check_not_fsdp1, check_not_wrapped
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import adapter_for
from para_core.adapters.weights.features import features
from para_core.cache.apply import cache_options
from para_core.cache.options import CacheOptions
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class


def check_cache(model: CheckedModel, options: CacheOptions | None = None) -> None:
    """Run the checks before a cache with ``options`` is applied to ``model``. The first check that fails
    raises.

    ``options=None`` leaves out the checks that need them.
    """
    owner = model.owner
    module = model.module
    adapter = model.adapter
    # A transformer alone may have one: apply_cache_on_transformer replaces it.
    if model.component:
        check_no_second_cache(model.called, module, model.name)
    check_cache_has_transformer(owner, module)
    kind = kind_of(module)
    if kind is not None:
        kind.check_cache(owner, module)
    check_adapter_type(adapter, module)
    check_not_fsdp1(module, model.name)
    check_not_wrapped(module, model.name, adapter)
    check_blocks_can_be_skipped(owner, module, adapter)
    check_blocks_are_described(owner, module, adapter)
    if options is not None:
        check_has_scheduler(owner, options)


def check_cached_call(model: CheckedModel, options: CacheOptions) -> None:
    """Run the checks before a cached call of the pipeline of ``model``. The first check that fails raises."""
    module = model.module
    name = model.name
    check_cached_model_not_replaced(model.called, module, name)
    check_no_second_cache(model.called, module, name)
    check_has_scheduler(model.owner, options)
    for feature in features().values():
        for check in feature.cached_call_checks:
            check(module, name, model.called, options)


def check_cache_has_transformer(owner: Any, module: Any) -> None:
    """Refuse a cache for a pipeline without a transformer.

    Raises:
        TypeError: The pipeline has none.
    """
    if module is None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} cannot be cached: it has no transformer.",
            "Leave the cache out, or use one of the pipelines of docs/pipelines.md.",
        )


def check_blocks_can_be_skipped(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a cache on blocks that cannot be skipped.

    Raises:
        TypeError: The adapter says that they cannot be skipped.
    """
    adapter = adapter_for(module, adapter)
    if adapter is not None and adapter.blocks is None and adapter.uncached is not None:
        raise TypeError(
            f"{original_class(owner).__name__} cannot be cached: {adapter.uncached} "
            f"({original_class(module).__name__}). Leave the cache out; parallelize_pipe runs it on several ranks."
        )


def check_blocks_are_described(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a cache on blocks that no adapter describes.

    Raises:
        TypeError: No adapter describes them.
    """
    adapter = adapter_for(module, adapter)
    if adapter is None or adapter.blocks is None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} cannot be cached: no adapter describes the blocks of "
            f"{original_class(module).__name__}. The closest names of those that are supported: "
            f"{closest_cached(original_class(module).__name__)}.",
            "Describe them: apply_cache_on_pipe(pipe, adapter=Adapter(transformer='…', pipelines='…', "
            "blocks=CachedBlocks((BlockGroup(('blocks',)),)))).",
        )


def check_cached_model_not_replaced(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a transformer that replaced the one that has the cache.

    Raises:
        RuntimeError: The transformer was replaced.
    """
    if uncompiled(called) is not module:
        raise RuntimeError(
            f"{name} is another module than when the cache was applied. Call apply_cache_on_pipe(pipe, ...) again."
        )


def check_no_second_cache(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a cache of a pipeline whose transformer has a cache of its own.

    Raises:
        ValueError: The transformer has a cache of its own.
    """
    if cache_options(called) is not None or cache_options(module) is not None:
        raise ValueError(
            f"{name} has a cache of its own (apply_cache, apply_cache_on_transformer), and two caches would skip the "
            f"same blocks. Call para_core.remove_cache({name}), or leave out apply_cache_on_pipe(pipe, ...)."
        )


def check_has_scheduler(pipe: Any, options: CacheOptions) -> None:
    """Refuse a cache with options that need a schedule, if the pipeline has no scheduler.

    Raises:
        ValueError: It has none.
    """
    if options.needs_schedule and getattr(pipe, "scheduler", None) is None:
        raise ValueError(
            f"{options.needs_schedule[0]} needs a scheduler, and this {original_class(pipe).__name__} has none. Leave "
            "it out."
        )
