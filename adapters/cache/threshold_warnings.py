"""Warn after a generation if its cache did nothing useful. Tests: tests/cache/test_options.py.

There are four warnings, by the verdicts (:class:`~para_core.cache.decision.Verdict`) of the steps:

- a difference was not finite: some step has NOT_FINITE;
- never asked: there are no verdicts, because an argument switched the cache off in each call;
- no hits: some MISS and no HIT, so the threshold may be too low;
- only hits: some HIT, and no step that was computed for the difference or a limit (MISS, NOT_FINITE, LIMIT),
  so the threshold may be too high. Steps that were computed for another reason (WARMUP, SCHEDULE, REPEATED)
  do not count: no threshold changes them.

With ``compute_steps`` no step is HIT or MISS, so there is neither of the last two.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from para_core.cache.block_cache import BlockCache
from para_core.cache.decision import Verdict
from para_core.user_warnings import CacheWarning, ThresholdWarning, WarningLog


def warn_of_outcomes(name: str, cache: BlockCache, log: WarningLog) -> None:
    """Warn if the ended generation skipped no step or every step that it could, was never asked, or compared
    values whose difference was not finite.

    The host may wait for the device.

    Args:
        name: The pipeline, or the transformer of it that has the ``cache``, in messages.
        log: Gives each kind of warning once. Its owner,
            :class:`~para_core.adapters.cache.generation.PipelineCache`, clears it when the caches change.
    """
    verdicts = [Verdict(int(outcome.verdict)) for outcome in cache.outcomes]
    if Verdict.NOT_FINITE in verdicts:
        log.warn(
            f"{name}: residual",
            f"the difference by which the cache of the {name} decides was not finite at some steps (values that are "
            "all zero, or NaN), which were computed: see cache_report(pipe).",
            CacheWarning,
        )
    # The name is that of the last call only, but without verdicts no other call used the cache either.
    if not verdicts and cache.uncached_by is not None:
        log.warn(
            f"{name}: never asked",
            f"the cache of the {name} was asked at no step: the last call was given {cache.uncached_by}, with which "
            "all blocks run. Leave it out (a pipeline may have a switch: use_kv_cache=False), or "
            "remove_cache_from_pipe(pipe).",
            CacheWarning,
        )
    decided = {Verdict.HIT, Verdict.MISS}.intersection(verdicts)
    # A threshold of 0 asks for no hits, unless a policy decides in its place.
    if not decided or (cache.threshold == 0.0 and cache.options.policy is None):
        return
    if decided == {Verdict.MISS}:
        log.warn(
            f"{name}: no hits",
            f"the cache of the {name} skipped no step: {_describe_differences(cache, verdicts)}, and "
            f"{_describe_decision(cache)}. {_advise_change(cache, 'Raise', 'True')}.",
            ThresholdWarning,
        )
    elif not {Verdict.MISS, Verdict.NOT_FINITE, Verdict.LIMIT}.intersection(verdicts):
        log.warn(
            f"{name}: only hits",
            f"the cache of the {name} skipped every step that it could: {_describe_differences(cache, verdicts)}, and "
            f"{_describe_decision(cache)}. {_advise_change(cache, 'Lower', 'False')}, or set max_consecutive_hits.",
            ThresholdWarning,
        )


def _describe_differences(cache: BlockCache, verdicts: list[Verdict]) -> str:
    """Return the range of the differences that decided the steps, in words: of each step, the largest.

    At least one of ``verdicts`` is HIT or MISS. Each of these has differences, all of them finite.
    """
    largest = [
        max(_as_list(outcome.differences))
        for outcome, verdict in zip(cache.outcomes, verdicts, strict=True)
        if verdict in (Verdict.HIT, Verdict.MISS)
    ]
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
