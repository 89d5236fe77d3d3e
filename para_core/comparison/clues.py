"""Clues for debugging a module that differs on several ranks: its attention calls, settings, and advice.

:mod:`.difference` adds them to its result; nothing is decided by them. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from para_core.comparison.call_record import AttentionRecord, CallRecord

_WAYS_OUT = "Pass a 4-D mask over all tokens, or let para_core.adapters.propose_plan find a plan."


def clues_for(
    name: str, module: nn.Module, reference: CallRecord, ranks: Sequence[CallRecord]
) -> tuple[str, ...]:
    """Return what the records of the unmodified model and of each rank say of the submodule ``module``,
    ``name``.
    """
    reference_calls = _attention_calls(name, reference)
    calls_of_ranks = [_attention_calls(name, record) for record in ranks]
    facts = []
    if reference_calls:
        facts.append(f"unmodified: {reference_calls[0]}")
        facts += [f"rank {rank}: {calls[0]}" for rank, calls in enumerate(calls_of_ranks) if calls]
    if not reference_calls or not all(calls_of_ranks):
        return (*facts, *_limits(module, part=0, total=0))
    first_of_ranks = [calls[0] for calls in calls_of_ranks]
    largest = max(call.keys for call in first_of_ranks)
    limits = _limits(module, part=largest, total=reference_calls[0].keys)
    return (*facts, *limits, *_advise_on_attention(reference_calls[0], first_of_ranks))


def _attention_calls(name: str, record: CallRecord) -> list[AttentionRecord]:
    """Return the starts and ends of attention calls in the module ``name``, in the order of time. So each
    call is in the list twice, if it has ended; callers read the first one only.
    """
    return [
        entry.attention for entry in record.entries if entry.module == name and entry.attention is not None
    ]


def _limits(module: nn.Module, *, part: int, total: int) -> Iterator[str]:
    """Yield the settings of ``module`` and of its config that may limit attention, such as windows.

    Args:
        module: The module.
        part: Number of keys on a rank; 0 if it is unknown.
        total: Number of keys of the unmodified model; 0 if it is unknown.
    """
    for setting, value in _settings(module).items():
        key = setting.removeprefix("config.")
        is_limit = "window" in key or "causal" in key or key in ("layer_type", "attention_type")
        if not is_limit or not isinstance(value, (bool, int, str, tuple)):
            continue
        fact = f"{setting} = {value!r}"
        if type(value) is int and part <= value < total:
            fact += (
                f": not shorter than a rank's part ({part} tokens), but shorter than the sequence ({total})"
            )
        yield fact


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` and the entries of its config, by name."""
    config = getattr(getattr(module, "config", None), "__dict__", {})
    return {**vars(module), **{f"config.{key}": value for key, value in config.items()}}


def _advise_on_attention(reference: AttentionRecord, ranks: Sequence[AttentionRecord]) -> list[str]:
    """Return advice for a module whose first attention call on one rank and on each rank are these."""
    if reference.mask is not None and any(call.mask is None for call in ranks):
        reason = (
            "The model makes its mask from the length that it is given, and makes none for a rank's part."
        )
        return [f"{reason} {_WAYS_OUT}"]
    # A mask of one dim has no rows.
    has_own_rows = [call.mask is not None and call.mask[-2:-1] == (call.queries,) for call in ranks]
    if any(own and call.queries != reference.queries for own, call in zip(has_own_rows, ranks, strict=True)):
        reason = "Its mask has a row for each token of a rank: if the model made it, rows count from 0 on every rank."
        return [f"{reason} {_WAYS_OUT}"]
    if len({call.is_causal for call in (reference, *ranks)}) > 1:
        return ["is_causal is not the same on all ranks: some models switch it off for a single token."]
    return []
