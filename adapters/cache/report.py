"""The report of the cache of a diffusers pipeline."""

from __future__ import annotations

from typing import Any

from para_core.adapters.cache.generation import caching_of
from para_core.cache.report import CacheReport, report_of
from para_core.instance.private_class import original_class


def cache_report(pipe: Any) -> CacheReport:
    """Return a report of the cache's decision at each step of the last generation of ``pipe``.

    It is a `CacheReport` to ``print``, ``.plot(path)`` or ``.to_json(path)``, with the steps of this rank; it
    has none before the first generation.

    Args:
        pipe (`DiffusionPipeline`): A pipeline with a cache.

    Raises:
        ValueError: If the pipeline has no cache.
    """
    caching = caching_of(pipe)
    if caching is None:
        raise ValueError(
            f"this {original_class(pipe).__name__} has no cache: call apply_cache_on_pipe(pipe) first."
        )
    return report_of(list(caching.caches.values()))
