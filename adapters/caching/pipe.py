"""Putting First Block Cache on a diffusers pipeline, and seeing what it did."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.caching.generation import KEY, PipelineCache, caching_of, require_schedule
from para_core.adapters.models.supported import adapter_for, cached, transformers_of
from para_core.cache.apply import apply_cache
from para_core.cache.block_cache import BlockCache
from para_core.cache.blocks import CachedBlocks
from para_core.cache.options import SCHEDULED, CacheOptions, Policy, Rule, rule_of
from para_core.cache.report import CacheReport
from para_core.instance import original_class, uncompiled, unwrap, wrap_method

Pipeline = TypeVar("Pipeline")
Transformer = TypeVar("Transformer", bound=nn.Module)


def apply_cache_on_pipe(
    pipe: Pipeline,
    *,
    residual_diff_threshold: float | None = None,
    warmup_steps: int = 0,
    max_consecutive_hits: int | None = None,
    always_compute_last: bool = False,
    start: float = 0.0,
    end: float = 1.0,
    first_blocks: int = 1,
    last_blocks: int = 0,
    forecast_order: int = 0,
    downsample: int = 1,
    rule: str | Rule = "first_block",
    policy: Policy | None = None,
    adapter: Adapter | None = None,
) -> Pipeline:
    """Skip most blocks of this one pipeline's transformer at steps where its first block changes little.

    The first block always runs. Where its residual differs from that of the last computed step by less than the threshold
    (mean|change| / mean|last|), the others are skipped, and their stored residual is added. This approximates; nothing
    else that para_core does does. Calling it again with other settings takes effect; :func:`remove_cache_from_pipe` undoes
    it. Goes with :func:`parallelize_pipe`, ``torch.compile``, offload and LoRA, in any order.

    Args:
        pipe: any diffusers pipeline on a supported transformer.
        residual_diff_threshold: larger is faster and less like the original; 0 computes all. Left out: the default of the
            model's family.
        warmup_steps: so many first steps of each branch are computed; the first one always is.
        max_consecutive_hits: after so many skipped steps one is computed.
        always_compute_last: compute the last step of the schedule.
        start, end: skip only between these fractions of the schedule's steps.
        first_blocks: so many first blocks always run, and the residual is that of all of them together.
        last_blocks: so many last blocks always run.
        forecast_order: 0 adds the stored residual; 1 and 2 extrapolate it in the schedule's time through the last two or
            three computed steps.
        downsample: compare every n-th channel only.
        rule: ``"first_block"``, another name in ``para_core.cache.options.RULES``, or a ``Rule`` of your own.
        policy: decides instead of the threshold: called with an ``Observation``, returns whether to skip. In a compiled
            graph its numbers are 0-dim tensors.
        adapter: what is to be known of a transformer that is not supported, or instead of what is known here.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: the pipeline is not supported, or an option does not fit.
    """
    options = CacheOptions(
        0.0 if residual_diff_threshold is None else residual_diff_threshold,
        warmup_steps=warmup_steps,
        max_consecutive_hits=max_consecutive_hits,
        always_compute_last=always_compute_last,
        start=start,
        end=end,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
        forecast_order=forecast_order,
        downsample=downsample,
        rule=rule_of(rule),
        policy=policy,
    )
    made: dict[str, BlockCache] = {}
    transformers = transformers_of(pipe)
    if not transformers:
        raise TypeError(f"{original_class(pipe).__name__} cannot be cached: it has no transformer.")
    for name, transformer in transformers.items():
        known, blocks = _known(pipe, transformer, adapter)
        chosen = (
            replace(options, residual_diff_threshold=known.threshold) if residual_diff_threshold is None else options
        )
        made[name] = BlockCache(transformer, blocks, chosen)
    require_schedule(pipe, options)
    caching = caching_of(pipe)
    if caching is None:
        caching = PipelineCache()
        wrap_method(pipe, "__call__", KEY, caching.around)
    caching.replace(made, adapter)
    return pipe


def apply_cache_on_transformer(
    transformer: Transformer,
    *,
    residual_diff_threshold: float | None = None,
    adapter: Adapter | None = None,
    **options: Any,
) -> Transformer:
    """:func:`para_core.apply_cache` for a transformer of diffusers whose blocks are known, in a denoising loop of your own.

    Call ``para_core.reset_cache(transformer)`` before each generation; ``para_core.remove_cache(transformer)`` undoes it.

    Args:
        residual_diff_threshold, adapter: as for :func:`apply_cache_on_pipe`.
        **options: of ``para_core.apply_cache``. What follows a schedule needs a pipeline.

    Returns:
        ``transformer``.
    """
    defaults = {field.name: field.default for field in fields(CacheOptions) if field.name in SCHEDULED}
    unread = {name: options.pop(name) for name in SCHEDULED if name in options}
    asked = [f"{name}={value!r}" for name, value in unread.items() if value != defaults[name]]
    if asked:
        raise ValueError(
            f"{asked[0]} was given, which reads pipe.scheduler; a transformer alone has no schedule. Leave it out, or use "
            "apply_cache_on_pipe(pipe, ...)."
        )
    module = uncompiled(transformer)
    known, blocks = _known(module, module, adapter)
    threshold = known.threshold if residual_diff_threshold is None else residual_diff_threshold
    return apply_cache(transformer, blocks, residual_diff_threshold=threshold, **options)


def _known(thing: Any, transformer: nn.Module, adapter: Adapter | None) -> tuple[Adapter, CachedBlocks]:
    if adapter is not None and not isinstance(adapter, Adapter):
        cls = original_class(transformer).__name__
        way_out = f"Adapter(transformer='{cls}', pipelines='…', blocks=CachedBlocks(...))"
        raise TypeError(f"adapter is {adapter!r}; expected an Adapter, or None: adapter={way_out}.")
    known = adapter_for(transformer, adapter)
    if known is None or known.blocks is None:
        raise TypeError(
            f"{original_class(thing).__name__} cannot be cached: the blocks of {original_class(transformer).__name__} are not "
            f"known. Known are {cached()}. Describe them: apply_cache_on_pipe(pipe, adapter=Adapter(transformer='…', "
            "pipelines='…', blocks=CachedBlocks((Stage(('blocks',)),))))."
        )
    return known, known.blocks


def remove_cache_from_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`apply_cache_on_pipe`; returns ``pipe``, which is then what it was before."""
    caching = caching_of(pipe)
    if caching is not None:
        unwrap(pipe, KEY)
        caching.remove(pipe)
    return pipe


def cache_report(pipe: Any) -> CacheReport:
    """What the cache of ``pipe`` did in its last generation; ``print`` it, ``.plot(path)`` it, ``.to_json(path)``."""
    caching = caching_of(pipe)
    if caching is None:
        raise ValueError(f"this {original_class(pipe).__name__} has no cache: call apply_cache_on_pipe(pipe) first.")
    return caching.report()
