"""Public functions that apply First Block Cache to diffusers pipelines and transformers, and remove it.

What then runs in a generation is in ``generation.py``; the cache of a model that is not of diffusers is
applied by ``para_core/cache/apply.py``. Tests: tests/cache/test_options.py, tests/cache/test_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.cache.checks import check_cache
from para_core.adapters.cache.generation import PipelineCache, caching_of
from para_core.adapters.compatibility.checks import CheckedModel, models_to_check
from para_core.adapters.registry import check_pipeline_or_model, mesh_of, require_adapter, require_blocks
from para_core.cache.apply import apply_cache
from para_core.cache.block_cache import BlockCache
from para_core.cache.options import CacheOptions, options_of
from para_core.cache.rules import FIRST_BLOCK, rule_of
from para_core.declared_options import shows_options
from para_core.distributed.agree import together
from para_core.instance.modules import instances_in, uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot, restore_on_failure
from para_core.instance.slots import Slot

Pipeline = TypeVar("Pipeline")
Transformer = TypeVar("Transformer", bound=nn.Module)


@shows_options(CacheOptions, residual_diff_threshold=None)
def apply_cache_on_pipe(
    pipe: Pipeline,
    *,
    adapter: Adapter | None = None,
    per_transformer: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Pipeline:
    """Skip most transformer blocks of ``pipe`` at steps at which its first-block residual changes little. Not
    exact.

    The first block always runs. If its residual differs from that of the last computed step by less than the
    threshold (mean|change| / mean|last|), the other blocks are skipped, and a forecast of their residual is
    added instead.

    Calling this function again replaces the settings; :func:`remove_cache_from_pipe` undoes it. It can be
    combined with :func:`parallelize_pipe`, ``torch.compile``, offload and LoRA, in any order. On a parallel
    pipeline every rank calls it, and an error on one rank raises on all of them. After an error the pipeline
    has the cache that it had before, or none.

    Args:
        pipe (`DiffusionPipeline`): A pipeline with a supported transformer.
        adapter (`Adapter`, *optional*): The adapter of a transformer that is not supported. It has priority
            over the library's adapter for the same class.
        per_transformer (`Mapping[str, Mapping[str, Any]]`, *optional*): Options of single transformers by
            component name, which override ``options``: ``{"transformer_2": {"residual_diff_threshold":
            0.1}}`` for Wan 2.2.
        **options: The options of ``para_core.CacheOptions``. ``residual_diff_threshold`` defaults to the
            threshold of the adapter, which is valid for ``rule="first_block"`` only.

    Returns:
        ``pipe`` itself.

    Raises:
        TypeError: ``pipe`` is no pipeline, no adapter describes the blocks of its transformers or they cannot
            be skipped, a transformer is inside a wrapper for training (DistributedDataParallel, FSDP1),
            ``adapter`` is no `Adapter`, ``per_transformer`` is no dict of dicts, or an option is unknown or
            has a wrong type.
        ValueError: An option is out of range, excludes another one, needs a scheduler that the pipeline
            lacks, or leaves no block to skip; ``rule`` is given without a threshold of its own;
            ``per_transformer`` names no transformer of the pipeline; a transformer lacks the blocks or
            arguments that its adapter names, or has another cache already: one of :func:`apply_cache`,
            :func:`apply_cache_on_transformer` or diffusers.
        ImportError, RuntimeError: On a parallel pipeline, another rank has failed by such an error, or does
            not answer.
        RuntimeError: Another pipeline is running a call of one of the transformers, with a cache that skips
            other blocks.
    """
    check_pipeline_or_model("pipeline", pipe, "apply_cache_on_transformer takes a transformer.")
    mesh = mesh_of(pipe)
    # The ranks decide together whether to skip a step, so either all of them get the new cache or none.
    agreement: AbstractContextManager[None] = nullcontext()
    if mesh is not None:
        agreement = together(mesh, "the cache could not be applied")
    if per_transformer is None:
        per_transformer = {}
    # Everything is put back after the agreement has raised on all ranks: first the settings of the caches,
    # which only their own undo knows, then the slots.
    with restore_on_failure(instances_in(pipe)), ExitStack() as rollback:
        with agreement:
            caches = _resolve(pipe, adapter, per_transformer, options)
            caching = caching_of(pipe)
            if caching is None:
                caching = PipelineCache()
                fill_slot(pipe, Slot.CACHE, {"__call__": caching.run}, owner=caching)
            restore_caches = caching.undo()
            rollback.callback(restore_caches)
            caching.replace(caches, adapter)
        rollback.pop_all()
    return pipe


def _resolve(
    pipe: Any,
    adapter: Adapter | None,
    per_transformer: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, BlockCache]:
    """Validate the options and return a cache for each transformer of ``pipe``, by component name.
    Changes nothing.

    Raises:
        TypeError, ValueError: As :func:`apply_cache_on_pipe`.
    """
    models = models_to_check(pipe, adapter)
    # A model that cannot be cached is reported before an option that is wrong.
    for model in models:
        check_cache(model)
    if not isinstance(per_transformer, Mapping) or not all(
        isinstance(each, Mapping) for each in per_transformer.values()
    ):
        raise TypeError(
            f"per_transformer is {per_transformer!r}; expected a dict of options for each component name, such as "
            f"{{{models[0].component!r}: {{'residual_diff_threshold': 0.1}}}}."
        )
    names = [model.component for model in models]
    unknown = [name for name in per_transformer if name not in names]
    if unknown:
        raise ValueError(
            f"per_transformer names {unknown[0]!r}; this {original_class(pipe).__name__} has {', '.join(names)}."
        )
    caches: dict[str, BlockCache] = {}
    for model in models:
        resolved = require_adapter(model.module, adapter)
        chosen = _resolve_options(
            "apply_cache_on_pipe", {**options, **per_transformer.get(model.component, {})}, resolved
        )
        check_cache(model, chosen)
        if getattr(pipe, "scheduler", None) is not None:
            chosen = chosen.on_schedule()
        caches[model.component] = BlockCache(model.module, require_blocks(model.module, adapter), chosen)
    return caches


@shows_options(CacheOptions, residual_diff_threshold=None)
def apply_cache_on_transformer(
    transformer: Transformer, *, adapter: Adapter | None = None, **options: Any
) -> Transformer:
    """Apply First Block Cache to a diffusers transformer that your own denoising loop calls. Not exact.

    Like :func:`para_core.apply_cache`, with the block stack and the default threshold of the adapter. Call
    ``para_core.reset_cache(transformer)`` before each generation. ``para_core.remove_cache(transformer)``
    undoes it.

    Args:
        transformer (`nn.Module`): A supported transformer. It may be compiled.
        adapter (`Adapter`, *optional*): As in :func:`apply_cache_on_pipe`.
        **options: As in :func:`apply_cache_on_pipe`. Options that need a schedule are refused.

    Returns:
        ``transformer`` itself.

    Raises:
        TypeError: ``transformer`` is no model, no adapter describes its blocks or they cannot be skipped, it
            is inside a wrapper for training, ``adapter`` is no `Adapter`, or an option is unknown or has a
            wrong type.
        ValueError: An option is out of range, excludes another one, needs a schedule, or leaves no block to
            skip; ``rule`` is given without a threshold of its own; or the transformer lacks the blocks or
            arguments that its adapter names, or has a cache of diffusers.
        RuntimeError: A call of the model is running with a cache of a pipeline that skips other blocks.
    """
    check_pipeline_or_model("model", transformer, "apply_cache_on_pipe takes a pipeline.")
    module = uncompiled(transformer)
    check_cache(CheckedModel(module, module, adapter=adapter))
    chosen = _resolve_options("apply_cache_on_transformer", options, require_adapter(module, adapter))
    settings = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    return apply_cache(transformer, require_blocks(module, adapter), **settings)


def _resolve_options(function: str, options: Mapping[str, Any], adapter: Adapter) -> CacheOptions:
    """Return the options with the threshold of ``adapter`` if none is given. ``function`` is named in errors.

    Raises:
        TypeError, ValueError: An option is invalid, or the rule needs a threshold of its own.
    """
    has_threshold = options.get("residual_diff_threshold") is not None
    if not has_threshold:
        options = {**options, "residual_diff_threshold": adapter.threshold}
    chosen = options_of(function, options)
    if not has_threshold and rule_of(chosen.rule) is not FIRST_BLOCK and chosen.compute_steps is None:
        raise ValueError(
            f"rule {chosen.rule_name} was given without residual_diff_threshold; {adapter.threshold:g}, the "
            "default of these models, is one for first_block. Give one."
        )
    return chosen


def remove_cache_from_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`apply_cache_on_pipe` and return ``pipe``. A pipeline without a cache stays as it is.

    On a parallel pipeline every rank calls it before the next generation, which compares the caches of the
    ranks. This call itself is not collective.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.

    Raises:
        TypeError: If ``pipe`` is not a pipeline.
    """
    check_pipeline_or_model("pipeline", pipe, "para_core.remove_cache takes a model.")
    caching = caching_of(pipe)
    if caching is not None:
        caching.remove(pipe)
        # Unwrap the pipeline last: if removal fails before, a second call still finds the caches and removes
        # the rest.
        empty_slot(pipe, Slot.CACHE)
        # A callback may have removed the cache, and the generation that goes on must not attach it again.
        caching.caches = {}
    return pipe
