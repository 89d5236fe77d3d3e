"""What arguments of a call do to its block stack, found by leaving them out: ``between`` and ``uncached``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from para_core.adapters.propose.candidates import Region
from para_core.adapters.propose.observe import ObservedCall, observe
from para_core.adapters.propose.stack import cached_error, conditions_of, guess_blocks, is_chained
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.instance_patching import original_class


@dataclass(frozen=True)
class Stack:
    """A guess of the block stack.

    Args:
        inputs: of the call with which it is cached.
        reasons: why it names arguments.
    """

    blocks: CachedBlocks
    inputs: Mapping[str, Any]
    reasons: tuple[str, ...] = ()


def stacks(module: nn.Module, region: Region, inputs: Mapping[str, Any], tolerance: float) -> Iterator[Stack]:
    """Guesses of the block stack, the likeliest first.

    Args:
        tolerance: of the error of a call that skips blocks.
    """
    guess = guess_blocks(region)
    if guess is None or not all(group.chained for group in guess.groups):
        yield from _without_options(module, region, inputs, tolerance)
    if guess is not None:
        yield Stack(guess, inputs)
        if all(group.chained for group in guess.groups):
            yield from _without_options(module, region, inputs, tolerance)


def _without_options(module: nn.Module, region: Region, inputs: Mapping[str, Any], tolerance: float) -> Iterator[Stack]:
    """The stack of the call without what can be left out, and what each of these arguments does to it."""
    conditions = conditions_of(region.small, region.large)
    optional = [name for name in _optional(module, inputs) if name not in conditions]
    plain, seen = dict(inputs), None
    left_out = []
    for name in optional:
        fewer = {key: value for key, value in plain.items() if key != name}
        found = _observed(module, region, fewer)
        if found is not None:
            plain, seen = fewer, found
            left_out.append(name)
    blocks = None if seen is None else guess_blocks(replace(region, small=seen))
    if blocks is None or seen is None:
        return
    blocks = replace(blocks, conditions=conditions)
    between: dict[int, list[str]] = {}
    uncached, reasons = [], []
    for name in left_out:
        alone = {**plain, name: inputs[name]}
        with_it = _observed(module, region, alone)
        if with_it is None:
            continue
        if _order(with_it, blocks) != _order(seen, blocks):
            uncached.append(name)
            reasons.append(f"{name}: with it, other blocks run. It is called without the cache then.")
            continue
        places = [i for i, group in enumerate(blocks.groups) if group.chained and not _hands_on(with_it, group)]
        with_between = _with_between(blocks, {i: [name] for i in places})
        if not _is_exact(module, with_between, alone, tolerance):
            uncached.append(name)
            reasons.append(
                f"{name}: with it, a call that skips blocks is not exact. It is called without the cache then."
            )
            continue
        for i in places:
            between.setdefault(i, []).append(name)
            lists = " and ".join(blocks.groups[i].lists)
            reasons.append(
                f"{name}: with it, the model does more between the blocks of {lists} than to hand on their streams."
            )
    if between or uncached:
        found_blocks = replace(_with_between(blocks, between), uncached=tuple(uncached))
        cached = {name: value for name, value in inputs.items() if name not in uncached}
        yield Stack(found_blocks, cached, tuple(reasons))


def _optional(module: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """What ``inputs`` give though the model does not insist on it; switches left out, for they decide what it returns."""
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    return [
        name
        for name, value in inputs.items()
        if name in parameters
        and parameters[name].default is not inspect.Parameter.empty
        and value is not None
        and not isinstance(value, (bool, str))
    ]


def _observed(module: nn.Module, region: Region, inputs: Mapping[str, Any]) -> ObservedCall | None:
    try:
        return observe(module, inputs, region.start.block, region.start.streams)
    # Models fail in any way without what they need.
    except Exception:
        return None


def _order(seen: ObservedCall, blocks: CachedBlocks) -> list[str]:
    lists = [name for group in blocks.groups for name in group.lists]
    return [call.name for call in seen.calls if call.block_list in lists]


def _hands_on(seen: ObservedCall, group: BlockGroup) -> bool:
    calls = [call for name in group.lists for call in seen.of_list(name)]
    return is_chained(calls, group.streams)


def _with_between(blocks: CachedBlocks, between: Mapping[int, Sequence[str]]) -> CachedBlocks:
    groups = [replace(group, between=tuple(between.get(i, ()))) for i, group in enumerate(blocks.groups)]
    return replace(blocks, groups=tuple(groups))


def _is_exact(module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any], tolerance: float) -> bool:
    try:
        error = cached_error(module, blocks, inputs)
    # What is wrong with a guess makes models fail in any way.
    except Exception:
        return False
    return error is not None and error < tolerance
