"""Guess the block stack, and find the optional arguments that change it, by calling the model without each of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from para_core.adapters.propose.candidates import ObservedRegion
from para_core.adapters.propose.observe import ObservedCall, observe
from para_core.adapters.propose.stack import cached_error, conditions_of, guess_blocks, is_chained
from para_core.cache.blocks import CachedBlocks
from para_core.instance_patching import original_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StackGuess:
    """A guess of the block stack for First Block Cache.

    Args:
        blocks: The block stack.
        inputs: Arguments of a call in which this stack can be cached.
        reasons: A sentence for each argument that the guess lists in ``between`` or ``uncached``.
    """

    blocks: CachedBlocks
    inputs: Mapping[str, Any]
    reasons: tuple[str, ...] = ()


def stacks(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield guesses of the block stack, the likeliest first.

    Args:
        module: The model.
        region: Its observed calls.
        inputs: Arguments of the smaller call.
        tolerance (`float`): Relative error below which a call that skips blocks counts as exact.
    """
    guess = guess_blocks(region)
    if guess is None or not all(group.chained for group in guess.groups):
        yield from _without_options(module, region, inputs, tolerance)
    if guess is not None:
        yield StackGuess(guess, inputs)
        if all(group.chained for group in guess.groups):
            yield from _without_options(module, region, inputs, tolerance)


def _without_options(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield the block stack of a call without optional arguments, if it can be guessed.

    The block stack lists the optional arguments that change it: those with which the model changes tokens between
    blocks (``between``), and those with which other blocks run or a cached call is not exact (``uncached``).
    """
    conditions = conditions_of(region.small, region.large)
    optional = [name for name in _optional(module, inputs) if name not in conditions]
    plain, observed = dict(inputs), None
    left_out = []
    for name in optional:
        fewer = {key: value for key, value in plain.items() if key != name}
        observed_fewer = _observe_or_none(module, region, fewer)
        if observed_fewer is not None:
            plain, observed = fewer, observed_fewer
            left_out.append(name)
    blocks = None if observed is None else guess_blocks(replace(region, small=observed))
    if blocks is None or observed is None:
        return
    blocks = replace(blocks, conditions=conditions)
    between: dict[int, list[str]] = {}
    uncached, reasons = [], []
    for name in left_out:
        alone = {**plain, name: inputs[name]}
        with_it = _observe_or_none(module, region, alone)
        if with_it is None:
            continue
        if _block_order(with_it, blocks) != _block_order(observed, blocks):
            uncached.append(name)
            reasons.append(f"{name}: it changes which blocks run, so calls with it are not cached.")
            continue
        indices = [
            i
            for i, group in enumerate(blocks.groups)
            if group.chained
            and not is_chained([call for name in group.lists for call in with_it.of_list(name)], group.streams)
        ]
        with_between = _with_between(blocks, {i: [name] for i in indices})
        problem = _problem_of_cache(module, with_between, alone, tolerance)
        if problem is not None:
            uncached.append(name)
            reasons.append(f"{name}: with it a call that skips blocks {problem}, so calls with it are not cached.")
            continue
        for i in indices:
            between.setdefault(i, []).append(name)
            lists = " and ".join(blocks.groups[i].lists)
            reasons.append(f"{name}: with it, the model changes the streams between the blocks of {lists}.")
    if between or uncached:
        stack = replace(_with_between(blocks, between), uncached=tuple(uncached))
        cached = {name: value for name, value in inputs.items() if name not in uncached}
        yield StackGuess(stack, cached, tuple(reasons))


def _optional(module: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of ``inputs`` that have a default in ``forward``, so that a call may omit them.

    Names of booleans and strings are not returned, because these arguments decide what the model returns.
    """
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    return [
        name
        for name, value in inputs.items()
        if name in parameters
        and parameters[name].default is not inspect.Parameter.empty
        and value is not None
        and not isinstance(value, (bool, str))
    ]


def _observe_or_none(module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any]) -> ObservedCall | None:
    try:
        return observe(module, inputs, region.start.block, region.start.streams)
    except Exception as error:
        # The model may raise anything if an argument that it needs is missing. Then this argument belongs to every
        # call.
        logger.debug("%s cannot be called with %s alone: %s", type(module).__name__, ", ".join(inputs), error)
        return None


def _block_order(observed: ObservedCall, blocks: CachedBlocks) -> list[str]:
    lists = [name for group in blocks.groups for name in group.lists]
    return [call.name for call in observed.calls if call.block_list in lists]


def _with_between(blocks: CachedBlocks, between: Mapping[int, Sequence[str]]) -> CachedBlocks:
    groups = [replace(group, between=tuple(between.get(i, ()))) for i, group in enumerate(blocks.groups)]
    return replace(blocks, groups=tuple(groups))


def _problem_of_cache(
    module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any], tolerance: float
) -> str | None:
    """Compare a call that skips ``blocks`` with the unmodified call. Return None if the outputs agree within
    ``tolerance``, else the end of a sentence that says what is wrong.
    """
    try:
        error = cached_error(module, blocks, inputs)
    except Exception as failure:
        # With a wrong block stack the cached model may raise anything, which means that the guess is wrong.
        return f"fails ({type(failure).__name__}: {failure})"
    return None if error is not None and error < tolerance else "is not exact"
