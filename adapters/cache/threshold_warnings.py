"""Warn after a generation if the cache skipped no step or every step, or its residuals were not finite."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from para_core.cache.block_cache import BlockCache
from para_core.cache.decision import Verdict
from para_core.user_warnings import CacheWarning, ThresholdWarning, WarningLog


def warn_of_outcomes(name: str, cache: BlockCache, log: WarningLog) -> None:
    """Warn if the ended generation skipped no step or every step, or had residuals that are zero or not
    finite.

    Each kind of warning appears once until the caches or thresholds change. The host may wait for the device.

    Args:
        name: The pipeline, or the transformer of it that has the ``cache``, in messages.
    """
    verdicts = [Verdict(int(outcome.verdict)) for outcome in cache.outcomes]
    if Verdict.NOT_FINITE in verdicts:
        log.warn(
            f"{name}: residual",
            f"the first-block residual of the {name} was not finite at some steps, which were computed: "
            "see cache_report(pipe).",
            CacheWarning,
        )
    if not verdicts and cache.uncached_by is not None:
        log.warn(
            f"{name}: never asked",
            f"the cache of the {name} was asked at no step: each call was given {cache.uncached_by}, with which "
            "all blocks run. Leave it out (a pipeline may have a switch: use_kv_cache=False), or "
            "remove_cache_from_pipe(pipe).",
            CacheWarning,
        )
    num_hits = verdicts.count(Verdict.HIT)
    num_misses = verdicts.count(Verdict.MISS)
    if num_hits + num_misses == 0 or cache.threshold == 0.0:
        return
    if num_hits == 0:
        log.warn(
            f"{name}: no hits",
            f"the cache of the {name} skipped no step: {_describe_differences(cache, verdicts)}, and "
            f"{_describe_decision(cache)}. {_advise_change(cache, 'Raise', 'True')}.",
            ThresholdWarning,
        )
    elif num_misses == 0 and Verdict.LIMIT not in verdicts:
        log.warn(
            f"{name}: only hits",
            f"the cache of the {name} skipped every step that it could: {_describe_differences(cache, verdicts)}, and "
            f"{_describe_decision(cache)}. {_advise_change(cache, 'Lower', 'False')}, or set max_consecutive_hits.",
            ThresholdWarning,
        )


def _describe_differences(cache: BlockCache, verdicts: list[Verdict]) -> str:
    """Return the range of the differences that decided the steps, in words: of each step, the largest."""
    largest = []
    for outcome, verdict in zip(cache.outcomes, verdicts, strict=True):
        if verdict in (Verdict.HIT, Verdict.MISS) and outcome.differences is not None:
            difference = max(_as_list(outcome.differences))
            if math.isfinite(difference):
                largest.append(difference)
    if not largest:
        return "no difference was finite"
    return f"differences ranged from {min(largest):.4g} to {max(largest):.4g}"


def _as_list(differences: Any) -> list[float]:
    if isinstance(differences, Tensor):
        return list(differences.tolist())
    return list(differences)


def _describe_decision(cache: BlockCache) -> str:
    if cache.options.policy is not None:
        return f"policy={cache.options.as_text()['policy']} decides"
    return f"residual_diff_threshold is {cache.threshold:g}"


def _advise_change(cache: BlockCache, change: str, answer: str) -> str:
    if cache.options.policy is not None:
        return f"Let it return {answer} at some steps"
    return f"{change} it"
